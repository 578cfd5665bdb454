#!/usr/bin/env bash
# Starts this host's container of a run, in the background: `start.sh head CONFIG [key.sub=value ...]` on one host,
# `start.sh worker` on every other. See README.md.
#
#   MEGATRON_TREE_IMAGE  default megatron-tree
#   MEGATRON_TREE_DATA   the host's folder that all containers see as /data; default /data
#   MEGATRON_TREE_LOGS   the host's folder for Ray's logs; default /tmp/megatron-tree-ray
#   MEGATRON_TREE_SHM    size of /dev/shm: two model images, engine queues, Ray's object store; default 64g
#   MEGATRON_TREE_HEAD, _NODES, _JOIN_TIMEOUT_S, _RAY_ARGS and RAY_AUTH_TOKEN: see ../node.sh
set -euo pipefail

case ${1:-} in
  head | worker) ;;
  *) echo "start.sh: first argument: must be head or worker, got '${1:-}'" >&2 && exit 2 ;;
esac
logs=${MEGATRON_TREE_LOGS:-/tmp/megatron-tree-ray}
mkdir -p "$logs"
options=(
  --detach
  --name "megatron-tree-$1"
  --gpus all
  --network host # Ray and NCCL choose ports of their own
  --shm-size "${MEGATRON_TREE_SHM:-64g}"
  --ulimit memlock=-1 # NCCL pins memory
  --ulimit nofile=65536:65536
  --stop-timeout 1800 # an iteration's step and a checkpoint
  --restart on-failure:5 # goes on from the latest checkpoint; `docker stop` is no failure
  --volume "${MEGATRON_TREE_DATA:-/data}:/data"
  --volume "$logs:/tmp/ray"
)
for name in MEGATRON_TREE_{HEAD,NODES,JOIN_TIMEOUT_S,RAY_ARGS} RAY_AUTH_TOKEN; do
  [[ -z ${!name:-} ]] || options+=(--env "$name") # docker reads the value, so that no list of processes shows it
done
exec docker run "${options[@]}" "${MEGATRON_TREE_IMAGE:-megatron-tree}" examples/launch/node.sh "$@"

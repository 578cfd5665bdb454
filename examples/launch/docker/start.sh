#!/usr/bin/env bash
# Starts this host's container of a run, in the background: `start.sh head CONFIG [key.sub=value ...]` on one host,
# `start.sh worker` on every other. CONFIG is a path in the container. See README.md.
#
#   MEGATRON_TREE_IMAGE        default megatron-tree
#   MEGATRON_TREE_DATA         the host's folder that all containers see as /data; default /data
#   MEGATRON_TREE_LOGS         the host's folder for Ray's logs; default /tmp/megatron-tree-ray
#   MEGATRON_TREE_SHM          size of /dev/shm: two model images, engine queues, Ray's object store; default 64g
#   MEGATRON_TREE_DOCKER_ARGS  more options of `docker run`, separated by spaces, such as --env WANDB_API_KEY
#   MEGATRON_TREE_HEAD, _NODES, _JOIN_TIMEOUT_S, _RAY_ARGS and RAY_AUTH_TOKEN: see ../node.sh
set -euo pipefail

refuse() { # what, rule, value
  echo "start.sh: $1: must be $2, got '$3'" >&2
  exit 2
}

case ${1:-} in
  head) [[ -n ${2:-} ]] || refuse CONFIG "a config's path in the container" "" ;;
  worker) ;;
  *) refuse "first argument" "head or worker" "${1:-}" ;;
esac
data=${MEGATRON_TREE_DATA:-/data}
[[ -d $data ]] || refuse MEGATRON_TREE_DATA "a folder" "$data" # docker would make one that is root's
logs=${MEGATRON_TREE_LOGS:-/tmp/megatron-tree-ray}
[[ -d $logs ]] || { mkdir -p "$logs" && chmod 1777 "$logs"; } # the image's user writes there, whoever this is
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
  --volume "$(realpath "$data"):/data" # docker takes a relative path for the name of a volume
  --volume "$(realpath "$logs"):/tmp/ray"
)
for name in MEGATRON_TREE_{HEAD,NODES,JOIN_TIMEOUT_S,RAY_ARGS} RAY_AUTH_TOKEN; do
  [[ -z ${!name:-} ]] || options+=(--env "$name") # docker reads the value, so that no list of processes shows it
done
read -ra more <<<"${MEGATRON_TREE_DOCKER_ARGS:-}"
exec docker run "${options[@]}" ${more[@]+"${more[@]}"} "${MEGATRON_TREE_IMAGE:-megatron-tree}" \
  examples/launch/node.sh "$@"

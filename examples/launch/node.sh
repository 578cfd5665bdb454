#!/usr/bin/env bash
# One node of a cluster: Ray's head with the program, or a worker. Docker and Slurm start their nodes with it,
# KubeRay calls `hold` before it ends a pod.
#
#   node.sh head CONFIG [key.sub=value ...]  starts Ray's head, waits for all nodes, trains, stops Ray; ends with the
#                                            program's status: 0 done, 130 stopped and saved, 1 and 2 errors
#   node.sh worker                           joins the head and stays until it is gone
#   node.sh hold                             waits until no rank and no engine lives on this node
#
# SIGTERM, head: asks the program to save and stop. It is passed on once, for a second one would end the program at once.
# SIGTERM, worker: the node stays while ranks and engines need it to save.
# The program always runs with --resume: it goes on from the latest checkpoint of run.dir, or begins.
#
#   MEGATRON_TREE_HEAD            host:port of Ray's head, the same on all nodes; default, for one node: 127.0.0.1:6379
#   MEGATRON_TREE_NODES           nodes to wait for, the head included; default 1
#   MEGATRON_TREE_JOIN_TIMEOUT_S  how long head and workers wait for each other; default 600
#   MEGATRON_TREE_RAY_ARGS        more arguments of `ray start` on this node, separated by spaces
#   RAY_AUTH_TOKEN                a secret, the same on all nodes; without one, whoever reaches Ray's ports is trusted
set -euo pipefail

address=${MEGATRON_TREE_HEAD:-127.0.0.1:6379}
nodes=${MEGATRON_TREE_NODES:-1}
timeout_s=${MEGATRON_TREE_JOIN_TIMEOUT_S:-600}
here=$(dirname "${BASH_SOURCE[0]}")
ray=  # process id of `ray start --block`, also below
program=
stopping=

export RAY_USAGE_STATS_ENABLED=0
# Said on every node: on its own, Ray would ask for a token where the home folder happens to hold one.
if [[ -n ${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-} ]]; then
  export RAY_AUTH_MODE=token
else
  export RAY_AUTH_MODE=disabled
fi

say() { echo "node.sh: $*" >&2; }

refuse() { # what, rule, value
  say "$1: must be $2, got '$3'"
  exit 2
}

start_ray() { # arguments of `ray start`
  local more
  read -ra more <<<"${MEGATRON_TREE_RAY_ARGS:-}"
  ray start "$@" ${more[@]+"${more[@]}"} --block &
  ray=$!
}

stop_ray() {
  [[ -n $ray ]] || return 0
  kill -TERM "$ray" 2>/dev/null || true
  wait "$ray" || true
  ray=
}

# shellcheck disable=SC2016 # the inner bash expands them
head_is_up() { timeout 5 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "${address%:*}" "${address##*:}" 2>/dev/null; }

# Ranks and engines are children of the node's raylet.
hold() {
  local raylets
  raylets=$(pgrep ${ray:+-P "$ray"} -x raylet | paste -sd, -) || true
  while [[ -n $raylets ]] && pgrep -P "$raylets" -f '^ray::(_RankActor|Engine)' >/dev/null; do sleep 1; done
}

stop_program() { # why
  [[ -z $stopping ]] || return 0
  stopping=$1
  say "$1: the program is asked to save and stop"
  [[ -z $program ]] || kill -TERM "$program" 2>/dev/null || true
}

# Its status. A session of its own: a Ctrl-C of the terminal reaches the program through the trap alone, hence once.
run() {
  [[ -z $stopping ]] || return 130
  setsid "$@" &
  program=$!
  [[ -z $stopping ]] || kill -TERM "$program" # it came between the lines above
  while kill -0 "$program" 2>/dev/null; do
    kill -0 "$ray" 2>/dev/null || stop_program "Ray's head has ended"
    sleep 1
  done
  local status=0
  wait "$program" || status=$?
  say "$1 ended with status $status"
  return "$status"
}

run_head() {
  [[ -f ${1:-} ]] || refuse CONFIG "a file" "${1:-}" # Ray would start first, and wait for the other nodes
  trap 'stop_program signal' TERM INT
  trap stop_ray EXIT
  ! head_is_up || { say "$address is in use already" && return 1; }
  say "Ray's head at $address"
  start_ray --head --node-ip-address="${address%:*}" --port="${address##*:}" --include-dashboard=false
  export RAY_ADDRESS=$address
  if ! run python "$here/wait_for_nodes.py" "$nodes" "$timeout_s"; then
    [[ $stopping == signal ]] && return 130 || return 1
  fi
  run megatron-tree train "$@" --resume
}

run_worker() {
  trap 'stopping=yes' TERM INT
  trap stop_ray EXIT
  local deadline=$((SECONDS + timeout_s)) joined=
  while [[ -z $stopping ]] && ((SECONDS < deadline)); do
    if ! head_is_up; then
      sleep 2
      continue
    fi
    say "joining $address"
    start_ray --address="$address"
    while [[ -z $stopping ]] && kill -0 "$ray" 2>/dev/null && head_is_up; do
      if pgrep -P "$ray" -x raylet >/dev/null; then # the head has let this node in
        joined=yes
        deadline=$((SECONDS + timeout_s)) # one that fails may come again
      fi
      sleep 2
    done
    [[ -z $stopping ]] || hold
    stop_ray
    say "left $address"
  done
  [[ -n $joined || -n $stopping ]] || { say "no head at $address let this node in within $timeout_s s" && return 1; }
}

[[ $address =~ ^.+:[0-9]+$ ]] || refuse MEGATRON_TREE_HEAD host:port "$address"
[[ $nodes =~ ^[1-9][0-9]*$ ]] || refuse MEGATRON_TREE_NODES "a number from 1 up" "$nodes"
[[ $timeout_s =~ ^[1-9][0-9]*$ ]] || refuse MEGATRON_TREE_JOIN_TIMEOUT_S "seconds, a whole number" "$timeout_s"
if [[ ${1:-} == worker ]] || ((nodes > 1)); then # which no other host reaches at the default
  [[ -n ${MEGATRON_TREE_HEAD:-} ]] || refuse MEGATRON_TREE_HEAD "set where there are several nodes" ""
fi
case ${1:-} in
  head) shift && run_head "$@" ;;
  worker) run_worker ;;
  hold) hold ;;
  *) refuse "first argument" "head, worker or hold" "${1:-}" ;;
esac

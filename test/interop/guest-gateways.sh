# What the guests of gateway groups share: sourced, not run.
#
# Failures of members under verified writes to all disks; the operators' drill.  The script that sources this sets DISKS, and says how paths are
# seen: `paths_live COUNT`; FAULTS are the kinds of failures.

source "$(dirname "${BASH_SOURCE[0]}")/guest.sh"
PATIENCE=60
IMAGES=(rbd/one rbd/two)
declare -A PAUSES

# Writes to all disks and verifies what was written before, until it is told to end.  To be run in the background.
load() {
  local disk jobs=()
  for disk in "${DISKS[@]}"; do jobs+=(--name="${disk##*/}" --filename="$disk"); done
  trap '' PIPE    # see without_sigpipe
  exec fio --rw=randwrite --bs=4k --direct=1 --ioengine=libaio --iodepth=4 --serialize_overlap=1 --eta=never \
    --verify=crc32c --verify_fatal=1 --verify_backlog=64 --verify_state_save=0 --randseed=7 --size=8M --time_based \
    --runtime=3600 --output-format=json --output=/run/load.json "${jobs[@]}" >/run/load.err 2>&1
}
# Ends the load when its requests have; it must not have failed.  fio ends with 128 if it was told to.
end_load() { # PID
  local status=0
  kill "$1"
  wait "$1" || status=$?
  [[ $status == 128 ]] && sed -n '/^{/,$p' /run/load.json | jq -e 'all(.jobs[]; .error == 0)' >/dev/null
}
# The longest latency of a request, in ms.
longest() { sed -n '/^{/,$p' /run/load.json | jq '[.jobs[] | .write, .read | .clat_ns.max] | max / 1e6 | floor'; }
# Requests that a disk has completed.
completed() { awk '{print $1 + $5}' "/sys/block/${1##*/}/stat"; }
# Each disk completes requests from now on.
all_go_on() { # WHAT
  local disk before
  for disk in "${DISKS[@]}"; do
    before=$(completed "$disk")
    grown() { (($(completed "$disk") > before)); }
    await "$1: $disk" grown
  done
}

owned_elsewhere() { [[ $(host owner "${IMAGES[0]}") != "$1" ]]; } # MEMBER

# One failure of the owner of the first disk, under load.
round() { # FAULT
  local fault=$1 victim loading
  host settle >/dev/null
  await "all paths" paths_live 3
  victim=$(host owner "${IMAGES[0]}")
  load & loading=$!
  all_go_on "the load begins"
  sleep 1
  host "$fault" "$victim" >/dev/null
  await "another member owns ${IMAGES[0]} after $fault" owned_elsewhere "$victim"
  all_go_on "requests after $fault"
  end_load $loading || { cat /run/load.err /run/load.json; fail "fio goes on while $victim fails: $fault"; }
  case $fault in
    kill | stop) host start "$victim" >/dev/null ;;
    drain) host undrain "$victim" >/dev/null ;;
    isolate) host restore >/dev/null ;;
    suspend) host resume "$victim" >/dev/null ;;
  esac
  PAUSES[$fault]+=" $(longest)"
}

rounds() { # COUNT
  local number fault
  for ((number = 0; number < $1; number++)); do
    fault=${FAULTS[number % ${#FAULTS[@]}]}
    round "$fault"
    echo "round $((number + 1)): $fault, longest request $(longest) ms"
  done
  for fault in "${FAULTS[@]}"; do
    [[ -n ${PAUSES[$fault]:-} ]] && ok "$fault under load: longest requests of${PAUSES[$fault]} ms, no error"
  done
  host settle >/dev/null
}

gateway1() { try_host at gateway1 "$@"; }
gateway2() { try_host at gateway2 "$@"; }
gateway3() { try_host at gateway3 "$@"; }

# Runs the blocks of the drill as they are printed.
drill() { # PAGE ADDRESS
  local page=$1 ADDRESS=$2 POOL=rbd DISK='' heading='' block='' line inside=
  mkdir -p /run/drill && cd /run/drill
  trap 'echo "not ok guest: the drill, $heading: $BASH_COMMAND"; tail -n 20 /run/block.log drill.log' ERR
  while IFS= read -r line; do
    case $line in
      '```sh') inside=1 block='' ;;
      '```')
        # What the page prints has to fail the script, too: not in a condition, which would let errors pass.
        if [[ -n $inside ]]; then
          eval "$block" >/run/block.log 2>&1
          cat /run/block.log >>drill.log
          [[ $block != *drill_clat* ]] || cp /run/block.log noticed
          inside=
          [[ $block != *connect-all* ]] || await "the drill's disk" find_disk
        fi ;;
      '## '*) [[ -z $heading ]] || ok "the drill, $heading"; heading=${line#'## '} ;;
      *) [[ -z $inside ]] || block+=$line$'\n' ;;
    esac
  done <"$page"
  ok "the drill, $heading"
  sed 's/^/the drill: /' noticed
  trap - ERR
}
# Sets DISK to the disk of the drill, which is larger than the others, once it is there.
find_disk() {
  local disk
  for disk in $(disks); do
    if [[ $(<"$disk/size") == $((64 << 11)) ]]; then DISK=/dev/${disk##*/}; fi
  done
  [[ -n $DISK ]]
}

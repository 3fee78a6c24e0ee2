# What the scripts share that boot guests with vhost-user-blk devices; sourced, with NAME set as for test/lab/cluster.sh.
#
#   BACKEND=forebay   (default) a daemon of FOREBAY serves the devices
#   BACKEND=qemu      a qemu-storage-daemon for each does, to prove the scripts without a front of ours.  QEMU 7.2's has
#                     neither packed rings nor a region of requests in flight, and tells nobody of a resize (10.0's does)
#   POOL=local        (default) the images are in the daemon's own store
#   POOL=rados        they are in a Ceph cluster of the script's own, each with a write log in front
source "$(dirname "${BASH_SOURCE[0]}")/../lab/cluster.sh"
BACKEND=${BACKEND:-forebay}
POOL=${POOL:-local}
declare -A SERVER EXPORT
DAEMON_FLAGS=()

# Ends a process that was started here, and all that it has started.
end_tree() { # PROCESS
  local child
  for child in $(ps -o pid= --ppid "$1" 2>/dev/null); do end_tree "$child"; done
  kill -9 "$1" 2>/dev/null || true
}
qmp() { limit 60 "$LAB/qmp" "$@"; }
image_file() { echo "$WORK/${1//\//_}.img"; }

# Prints what an image is called.
image() { if [[ $POOL == rados ]]; then echo "rbd/$1"; else echo "local/$1"; fi; }
# Starts what serves devices, with more flags of `forebay serve`.
start_backend() {
  DAEMON_FLAGS=("$@")
  if [[ $POOL == rados ]]; then start_cluster; else unset CEPH_CONF; fi
  [[ $BACKEND == qemu ]] || start_daemon "$@"
}
create() { # IMAGE SIZE
  case $BACKEND in
    forebay) ask "$FOREBAY" create "$1" --size "$2" ;;
    qemu) truncate -s "$2" "$(image_file "$1")" ;;
  esac
}
import() { # FILE IMAGE
  case $BACKEND in
    forebay) ask "$FOREBAY" import --no-progress "$1" "$2" ;;
    qemu) cp --sparse=always "$1" "$(image_file "$2")" ;;
  esac
}
export_image() { # IMAGE FILE
  case $BACKEND in
    forebay) ask "$FOREBAY" export --no-progress "$1" "$2" ;;
    qemu) cp --sparse=always "$(image_file "$1")" "$2" ;;
  esac
}
resize() { # IMAGE SIZE
  local socket
  case $BACKEND in
    forebay) ask "$FOREBAY" resize --no-progress "$1" --size "$2" ;;
    qemu)
      for socket in "${!EXPORT[@]}"; do
        [[ ${EXPORT[$socket]% *} != "$1" ]] ||
          ask "$LAB/qmp" "$socket.qmp" block_resize "{\"node-name\": \"disk\", \"size\": $(numfmt --from=iec "$2")}"
      done ;;
  esac
}
# Sets USED to the bytes that an image takes that is served, with all that is in its write log.
measure() { # IMAGE
  case $BACKEND in
    forebay)
      [[ $POOL != rados ]] || ask "$FOREBAY" log flush "$1"
      ask "$FOREBAY" du "$1" --format json
      USED=$(jq '.images[0].used_size' "$WORK/out") ;;
    qemu) USED=$(($(stat -c %b "$(image_file "$1")") * 512)) ;;
  esac
}
# Serves an image at a socket.
attach() { # IMAGE SOCKET QUEUES
  local log=()
  EXPORT[$2]="$1 $3"
  [[ $POOL != rados ]] || log=(--log "ssd:$WORK/logs:256M")
  case $BACKEND in
    forebay) ask "$FOREBAY" attach "$1" --vhost "$2" --queues "$3" "${log[@]}" ;;
    qemu) start_storage_daemon "$2" ;;
  esac
}
start_storage_daemon() { # SOCKET
  local image queues
  read -r image queues <<<"${EXPORT[$1]}"
  qemu-storage-daemon --blockdev "driver=file,node-name=file,filename=$(image_file "$image"),discard=unmap,locking=off" \
    --blockdev driver=raw,node-name=disk,file=file,discard=unmap --chardev "socket,id=m,path=$1.qmp,server=on,wait=off" \
    --monitor chardev=m \
    --export "vhost-user-blk,id=e,node-name=disk,addr.type=unix,addr.path=$1,writable=on,num-queues=$queues" \
    >>"$WORK/daemon.log" 2>&1 &
  SERVER[$1]=$!
  await 30 "$1 is served" qmp "$1.qmp" query-block-exports
}
# Kills what serves the devices, and starts it again with the same commands.
crash() {
  local socket
  if [[ $BACKEND == forebay ]]; then
    kill -9 "$DAEMON"
    wait "$DAEMON" 2>/dev/null
    start_daemon "${DAEMON_FLAGS[@]}"
    return
  fi
  for socket in "${!SERVER[@]}"; do
    kill -9 "${SERVER[$socket]}"
    wait "${SERVER[$socket]}" 2>/dev/null
    start_storage_daemon "$socket"
  done
}
# Stops what serves the devices, which must end well.
stop_backend() {
  local server servers=("${SERVER[@]}")
  [[ $BACKEND == qemu ]] || servers=("$DAEMON")
  for server in "${servers[@]}"; do
    kill -TERM "$server"
    wait "$server" || fail "what serves the devices has ended with $?"
  done
  DAEMON='' SERVER=()
}

# Starts a guest, whose console goes to a file, too; GUEST is its process.  The guest's settings are variables.
start_guest() { # CONSOLE SCRIPT [ARGUMENTS...]
  : >"$1"
  "$LAB/guest" "$LAB/../interop/$2" "${@:3}" > >(tee "$1") 2>&1 &
  GUEST=$!
  GUESTS+=("$GUEST")
}
# Waits until a guest has written a line that begins with this, for so many seconds of quiet time.
until_guest() { # SECONDS CONSOLE TEXT
  local end NOW
  quiet_now
  end=$((NOW + $1))
  until grep -q "^$3" "$2"; do
    ! grep -q '^not ok' "$2" || fail "the guest"
    kill -0 "$GUEST" 2>/dev/null || fail "the guest has ended before '$3'"
    quiet_now
    ((NOW <= end)) || fail "waiting until the guest says '$3'"
    sleep 0.2
  done
}
# Waits for the end of a guest, which must be a good one.
await_guest() {
  wait "$GUEST" || fail "the guest ended with $?"
}
# Does what the guest asks for with `serve WORDS...` of the script, until its end, which must be a good one.
serve_guest() {
  local words
  while kill -0 "$GUEST" 2>/dev/null; do
    if [[ -e $WORK/share/ask ]]; then
      mapfile -t words <"$WORK/share/ask"
      rm "$WORK/share/ask"
      serve "${words[@]}"
      echo 0 >"$WORK/share/answer.new" && mv "$WORK/share/answer.new" "$WORK/share/answer"
    fi
    sleep 0.05
  done
  await_guest
}
end_guests() {
  local guest
  for guest in "${GUESTS[@]}"; do end_tree "$guest"; done
}
GUESTS=()
AT_END=(end_guests)
# Looks at an image from which Debian has run: its size, its file system, and the file that was left in it.
look_at_left() { # IMAGE MIB
  rm -f "$WORK/exported"
  export_image "$1" "$WORK/exported"
  [[ $(stat -c %s "$WORK/exported") == $(($2 << 20)) ]] || fail "the size of $1"
  ask e2fsck -f -n "$WORK/exported"
  debugfs -R "dump /root/left $WORK/left" "$WORK/exported" 2>"$WORK/out"
  [[ $(sha256sum <"$WORK/left" | cut -d' ' -f1) == $(debugfs -R "cat /root/left.sum" "$WORK/exported" 2>/dev/null) ]] ||
    fail "the file that was left in $1"
  ok "$1 has a clean file system, and what was left in it"
}

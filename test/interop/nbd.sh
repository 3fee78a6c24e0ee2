#!/usr/bin/env bash
# Real NBD clients against a server: nbdinfo, nbdcopy, qemu-img, qemu-io, fio, and nbdsh where it is installed.
#
#   nbd.sh URI...             each names a writable volume of 64 MiB or more, whose content is LOST
#   FOREBAY=PROGRAM nbd.sh    starts a daemon of its own, over a Unix socket and then over TCP
#
# Prints a line for each check, and ends with 1 at the first that fails, after what the client said.
set -uo pipefail
source "$(dirname "$0")/../lab/limits.sh"

WORK=$(mktemp -d "${TMPDIR:-/tmp}/nbd-interop.XXXXXX")
LABEL=nbd
DAEMON=
PATIENCE=120
source "$(dirname "$0")/nbd-checks.sh"

# qemu-io reports a pattern that does not match with words and status 0, in some versions.
qio() { # WHAT COMMAND...
  local what=$1 args=() command
  shift
  for command in "$@"; do args+=(-c "$command"); done
  limit 120 qemu-io -f raw "${args[@]}" "$URI" >"$WORK/out" 2>&1 </dev/null || fail "$what (status $?)"
  ! grep -Eiq 'failed|error|no such' "$WORK/out" || fail "$what"
  ok "$what"
}
needs() {
  local tool
  for tool in "$@"; do
    command -v "$tool" >/dev/null || { echo "not ok $LABEL: $tool is not installed"; exit 1; }
  done
}

inform() {
  check "nbdinfo" nbdinfo "$URI"
  says "fixed newstyle" 'newstyle-fixed'
  says "structured replies" 'structured packets|extended packets'
  says "base:allocation is offered" 'base:allocation'
  for can in flush fua zero trim df multi-conn fast-zero; do
    check "can $can" nbdinfo --can "$can" "$URI"
  done
  refused "is not read-only" nbdinfo --is read-only "$URI"
  refused "does not pretend to cache" nbdinfo --can cache "$URI"
  check "nbdinfo --json" nbdinfo --json "$URI"
  says "sizes are told" '"block_size_maximum": *33554432'
  check "nbdinfo --list" nbdinfo --list "$URI"
  says "the list has the size" "export-size: $SIZE"
  refused "an unknown export is refused" nbdinfo --size "$STRANGER"
  check "and the server goes on" nbdinfo --size "$URI"
}

patterns() {
  qio "write and read back" 'write -P 0xa5 0 1M' 'read -P 0xa5 0 1M'
  qio "odd offsets and lengths" 'write -P 1 512 512' 'write -P 2 1536 4608' 'read -P 1 512 512' 'read -P 2 1536 4608' \
    'read -P 0xa5 0 512' 'read -P 0xa5 6144 1k'
  qio "force unit access" 'write -f -P 7 64k 64k' 'read -P 7 64k 64k'
  qio "write zeroes" 'write -P 9 2M 1M' 'write -z 2100k 300k' 'read -P 0 2100k 300k' 'read -P 9 2M 52k' 'read -P 9 2400k 672k'
  qio "write zeroes that may unmap" 'write -z -u 2M 1M' 'read -P 0 2M 1M'
  qio "write zeroes with force unit access" 'write -P 9 2M 64k' 'write -z -f 2M 64k' 'read -P 0 2M 64k'
  qio "discard" 'write -P 3 4M 4M' 'discard 4M 4M' 'read -P 0 4M 4M'
  qio "long requests" 'write -P 5 8M 32M' 'read -P 5 8M 32M'
  qio "vectors" 'writev -P 6 40M 4k 8k 512 64k' 'readv -P 6 40M 64k 512 8k 4k'
  qio "asynchronous requests" 'aio_write -P 1 44M 1M' 'aio_write -P 2 45M 1M' 'aio_write -z 46M 1M' 'aio_flush' \
    'aio_read -P 1 44M 1M' 'aio_read -P 2 45M 1M' 'aio_read -P 0 46M 1M' 'aio_flush'
  qio "flush" 'write -P 8 47M 64k' 'flush' 'read -P 8 47M 64k'
  qio "the last bytes" "write -P 4 $((SIZE - 512)) 512" "read -P 4 $((SIZE - 512)) 512"
}

maps() {
  qio "zeroed all over" "write -z -u 0 $SPAN" 'flush'
  check "nbdinfo --map" nbdinfo --map --totals "$URI"
  # Bytes, share, state, and what the state is called; 0 is data.
  if ((SIZE <= SPAN)); then
    ! awk '$3 == 0 { found = 1 } END { exit !found }' "$WORK/out" || fail "nothing is left in the map"
    ok "nothing is left in the map"
  fi
  qio "two islands" 'write -P 1 8M 4M' 'write -P 2 24M 1M'
  check "nbdinfo --map" nbdinfo --map "$URI"
  awk '$1 <= 8388608 && $1 + $2 > 8388608 && $3 == 0 { found = 1 } END { exit !found }' "$WORK/out" || fail "the first island is in the map"
  awk '$1 <= 16777216 && $1 + $2 > 16777216 && $3 >= 2 { found = 1 } END { exit !found }' "$WORK/out" || fail "the sea between is in the map"
  ok "the map shows islands and the sea between them"
  check "qemu-img map" qemu-img map -f raw --output=json "$URI"
  says "qemu sees holes" '"zero": true'
  check "qemu-img info" qemu-img info -f raw "$URI"
}

copies() {
  # An image with data at its beginning, in its middle and at its end, and holes between.
  truncate -s "$SIZE" "$WORK/image"
  for at in 0 5 17 $((SIZE / 2097152)) $((SIZE / 1048576 - 3)); do
    dd if=/dev/urandom of="$WORK/image" bs=1M count=3 seek="$at" conv=notrunc status=none
  done
  dd if=/dev/urandom of="$WORK/image" bs=4k count=1 seek=9001 conv=notrunc status=none
  check "nbdcopy to the volume" nbdcopy --flush "$WORK/image" "$URI"
  check "nbdcopy from the volume" nbdcopy "$URI" "$WORK/back"
  check "it is the same" cmp "$WORK/image" "$WORK/back"
  check "qemu-img compare" qemu-img compare -f raw -F raw "$WORK/image" "$URI"
  rm -f "$WORK/back"
  check "qemu-img convert from the volume" qemu-img convert -f raw -O raw "$URI" "$WORK/back"
  check "it is the same" cmp "$WORK/image" "$WORK/back"
  rm -f "$WORK/back"
  check "a sparse copy" qemu-img convert -f raw -O qcow2 -S 64k "$URI" "$WORK/image.qcow2"
  qio "overwritten" "write -P 0xee 0 $SPAN"
  check "qemu-img convert to the volume" qemu-img convert -n -m 16 -W -f qcow2 -O raw "$WORK/image.qcow2" "$URI"
  check "it is the same" qemu-img compare -f raw -F raw "$WORK/image" "$URI"
  qio "overwritten" "write -P 0xee 0 $SPAN"
  check "nbdcopy over four connections" nbdcopy --connections=4 --requests=64 --request-size=65536 "$WORK/image" "$URI"
  check "it is the same" qemu-img compare -f raw -F raw "$WORK/image" "$URI"
  check "nbdcopy, one request at a time" nbdcopy --synchronous "$URI" "$WORK/back"
  check "it is the same" cmp "$WORK/image" "$WORK/back"
  rm -f "$WORK/back" "$WORK/image.qcow2"
}

benches() {
  check "qemu-img bench, reading" qemu-img bench -f raw -t none -c 4000 -d 32 -s 4096 "$URI"
  check "qemu-img bench, writing and flushing" qemu-img bench -f raw -t none -w -c 4000 -d 32 -s 4096 --flush-interval=64 "$URI"
}

fios() {
  local common=(fio --name=verify --ioengine=nbd --uri="$URI" --size=48M --verify=crc32c --verify_fatal=1
    --verify_state_save=0 --output-format=terse --aux-path="$WORK")
  check "fio, 4 KiB at random, verified" "${common[@]}" --rw=randwrite --bs=4k --iodepth=32 --io_size=32M
  check "fio, mixed sizes, verified" "${common[@]}" --rw=randwrite --bsrange=512-128k --bs_unaligned=0 --iodepth=16 --io_size=64M
  check "fio, sequential, verified" "${common[@]}" --rw=write --bs=1M --iodepth=8
  check "fio, a flush each 8 writes" "${common[@]}" --rw=randwrite --bs=4k --iodepth=8 --io_size=8M --fsync=8
  check "fio, reads and writes mixed" "${common[@]}" --rw=randrw --bs=8k --iodepth=64 --io_size=32M
  check "fio, trims before writes" "${common[@]}" --rw=trimwrite --bs=64k --iodepth=4 --verify=0
}

rudeness() {
  # A client that is killed at work, one that talks rubbish, one that says nothing and goes.
  { timeout -s KILL 0.5 fio --thread --name=killed --ioengine=nbd --uri="$URI" --size=48M --rw=randwrite --bs=64k --iodepth=64 \
    --time_based --runtime=30 --aux-path="$WORK" >"$WORK/out" 2>&1; } 2>/dev/null
  check "a client killed at work" nbdinfo --size "$URI"
  local python='
import os, socket, sys
target = sys.argv[1]
def connect():
    if target.startswith("unix:"):
        s = socket.socket(socket.AF_UNIX)
        s.connect(target[5:])
    else:
        host, port = target.rsplit(":", 1)
        s = socket.create_connection((host, int(port)))
    s.settimeout(10 * int(os.environ.get("HANG_FACTOR", "1")))
    return s
for talk in [os.urandom(4096), b"\0\0\0\3" + os.urandom(4096), b"GET / HTTP/1.0\r\n\r\n", b"\0\0\0\3IHAVEOPT\0\0\0\7\xff\xff\xff\xff", b""]:
    s = connect()
    try:
        s.sendall(talk)
        if talk:
            while s.recv(65536):
                pass
    except ConnectionError:
        pass
    s.close()
'
  check "clients that talk rubbish are sent away" python3 -c "$python" "$TARGET"
  check "and the server goes on" nbdinfo --size "$URI"
}

shell() {
  local interpreter
  # The distribution's bindings belong to the distribution's Python, which need not be the first one in PATH.
  for interpreter in python3 /usr/bin/python3 ''; do
    [[ -n $interpreter ]] && "$interpreter" -c 'import nbd' 2>/dev/null && break
  done
  if [[ -z $interpreter ]]; then
    echo "skip $LABEL: nbdsh is not installed"
    return
  fi
  local python='
import nbd, sys
def handle(structured=True, flags=None):
    h = nbd.NBD()
    h.set_request_structured_replies(structured)
    if flags is not None:
        h.set_handshake_flags(flags)
    h.add_meta_context("base:allocation")
    h.set_strict_mode(0)
    h.connect_uri(sys.argv[1])
    return h
def errno(call, *args, **more):
    try:
        call(*args, **more)
    except nbd.Error as error:
        return error.errno
for structured, flags in [(True, None), (False, None), (False, 0), (False, 1)]:
    h = handle(structured, flags)
    size = h.get_size()
    h.pwrite(b"x" * 1000, 12345, nbd.CMD_FLAG_FUA)
    assert h.pread(1000, 12345) == b"x" * 1000
    if structured:
        assert h.pread(65536, 0, nbd.CMD_FLAG_DF)
        seen = []
        h.block_status(1 << 20, 0, lambda name, offset, runs, error: seen.append(runs), nbd.CMD_FLAG_REQ_ONE)
        assert len(seen) == 1 and len(seen[0]) == 2
    assert errno(h.pread, 512, size) == "EINVAL"
    assert errno(h.pwrite, b"x" * 512, size) == "ENOSPC"
    h.zero(65536, 0, nbd.CMD_FLAG_NO_HOLE)
    h.shutdown()
'
  check "nbdsh, with and without structured replies" "$interpreter" -c "$python" "$URI"
}

# Debian's clients do not know extended headers (libnbd 1.18, QEMU 8.2 do): a client from the document takes their place.
extended() { # EXPORT: of more than 4 GiB, over the daemon's Unix socket
  local python='
import os, socket, struct, sys
s = socket.socket(socket.AF_UNIX)
s.settimeout(60 * int(os.environ.get("HANG_FACTOR", "1")))
s.connect(sys.argv[1])
def take(n):
    out = b""
    while len(out) < n:
        got = s.recv(n - len(out))
        assert got, "closed"
        out += got
    return out
def option(kind, data=b""):
    s.sendall(b"IHAVEOPT" + struct.pack(">II", kind, len(data)) + data)
    found = []
    while True:
        magic, of, reply, n = struct.unpack(">QIII", take(20))
        assert magic == 0x3e889045565a9 and of == kind
        found.append((reply, take(n)))
        if reply == 1 or reply >> 31:
            return found
def ask(kind, offset, length, payload=b"", flags=0):
    s.sendall(struct.pack(">IHHQQQ", 0x21e41c71, flags, kind, 7 + kind, offset, length) + payload)
    chunks = []
    while True:
        magic, flag, type, cookie, at, n = struct.unpack(">IHHQQQ", take(32))
        assert (magic, cookie, at) == (0x6e8a278c, 7 + kind, offset)
        chunks.append((type, take(n)))
        if flag & 1:
            return chunks
take(18)
s.sendall(struct.pack(">I", 3))
name = sys.argv[2].encode()
head = struct.pack(">I", len(name)) + name
assert option(11) == [(1, b"")]
assert option(8)[0][0] == 1 << 31 | 10
assert option(10, head + struct.pack(">II", 1, 15) + b"base:allocation")[-1] == (1, b"")
info = option(7, head + struct.pack(">H", 0))
size = struct.unpack(">HQH", info[0][1])[1]
gib = 1 << 30
assert size > 6 * gib
data = os.urandom(1 << 20)
assert ask(1, 5 * gib, len(data), data, 1 << 5) == [(0, b"")]
assert ask(0, 5 * gib, len(data)) == [(1, struct.pack(">Q", 5 * gib) + data)]
def status(offset, length):
    (type, body), = ask(7, offset, length)
    context, count = struct.unpack(">II", body[:8])
    assert type == 6 and len(body) == 8 + 16 * count
    return [struct.unpack(">QQ", body[8 + 16 * at:24 + 16 * at]) for at in range(count)]
assert status(0, size)[0] == (5 * gib, 3), status(0, size)
assert ask(6, 0, size - 512) == [(0, b"")]
assert ask(0, 5 * gib, 4096)[0][0] == 2
assert ask(1, 5 * gib, len(data), data, 1 << 5) == [(0, b"")]
assert ask(4, gib, 5 * gib) == [(0, b"")]
(length, state), = status(0, size)
assert (length, state) == (size, 3), (length, state)
assert ask(7, 0, 12, b"x" * 12, 1 << 5)[0][0] == 0x8001
assert ask(3, 0, 0) == [(0, b"")]
'
  check "extended headers, effects longer than 4 GiB" python3 -c "$python" "$WORK/nbd" "$1"
}

exercise() { # URI LABEL
  URI=$1 LABEL=$2
  case $URI in
    nbd+unix://*socket=*)
      TARGET=unix:$(sed 's/.*[?&]socket=\([^&]*\).*/\1/' <<<"$URI")
      STRANGER="nbd+unix:///no/such/export?socket=${TARGET#unix:}"
      ;;
    nbd://*)
      TARGET=$(sed 's,nbd://\([^/]*\).*,\1,' <<<"$URI")
      [[ $TARGET == *:* ]] || TARGET=$TARGET:10809
      STRANGER="nbd://$TARGET/no/such/export"
      ;;
    *) echo "not ok $LABEL: $URI is no nbd:// or nbd+unix:// URI" && exit 1 ;;
  esac
  check "connect" nbdinfo --size "$URI"
  SIZE=$(nbdinfo --size "$URI")
  ((SIZE >= 64 << 20)) || fail "$URI has only $SIZE bytes"
  SPAN=$((SIZE < 512 << 20 ? SIZE : 512 << 20))
  inform && patterns && maps && copies && benches && fios && shell && rudeness
}

read_only() { # URI
  URI=$1 LABEL="read-only"
  check "is read-only" nbdinfo --is read-only "$URI"
  refused "cannot trim" nbdinfo --can trim "$URI"
  check "reads" qemu-io -r -f raw -c 'read 0 1M' "$URI"
  refused "does not write" qemu-img bench -f raw -w -c 1 "$URI"
}

needs nbdinfo nbdcopy qemu-img qemu-io fio python3

if (($# > 0)); then
  number=0
  for uri in "$@"; do
    number=$((number + 1))
    exercise "$uri" "nbd$([[ $# -gt 1 ]] && echo " $number")"
  done
  exit 0
fi

[[ -n ${FOREBAY:-} ]] || { sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2; }
export FOREBAY_CONTROL=$WORK/control

serve() { # ADDR
  "$FOREBAY" serve --data "$WORK/data" --control "$FOREBAY_CONTROL" --nbd "$1" >"$WORK/daemon.log" 2>&1 &
  DAEMON=$!
  for _ in {1..300}; do
    "$FOREBAY" status >/dev/null 2>&1 && return
    kill -0 "$DAEMON" 2>/dev/null || break
    sleep 0.1
  done
  fail "the daemon is not ready"
}
stop() {
  kill -TERM "$DAEMON"
  wait "$DAEMON" || fail "the daemon ended with $?"
  DAEMON=
}
attach() { # NAME FLAGS...: its URI
  "$FOREBAY" attach "$@" --nbd 2>"$WORK/out" | tail -n 1
}

LABEL=daemon
serve "unix:$WORK/nbd"
for pool in local ram; do
  check "create $pool/interop" "$FOREBAY" create "$pool/interop" --size 256M
  uri=$(attach "$pool/interop") && [[ -n $uri ]] || fail "attach $pool/interop"
  exercise "$uri" "$pool"
  LABEL=daemon
done
check "create local/large" "$FOREBAY" create local/large --size 9G
uri=$(attach local/large) && [[ -n $uri ]] || fail "attach local/large"
extended local/large
check "old clients on the same volume" nbdinfo --map --totals "$uri"
check "detach" "$FOREBAY" detach local/large
check "create local/kept" "$FOREBAY" create local/kept --size 64M
uri=$(attach local/kept) && [[ -n $uri ]] || fail "attach local/kept"
URI=$uri
qio "something to keep" 'write -P 0x5a 1M 1M' 'flush'
check "detach" "$FOREBAY" detach local/kept
refused "what is detached is gone" nbdinfo --size "$uri"
uri=$(attach local/kept --read-only) && [[ -n $uri ]] || fail "attach --read-only"
read_only "$uri"
LABEL=daemon
check "detach" "$FOREBAY" detach local/kept
check "detach" "$FOREBAY" detach local/interop
stop
ok "stops"

serve "127.0.0.1:$((20000 + RANDOM % 12000))"
uri=$(attach local/kept) && [[ $uri == nbd://127.0.0.1:* ]] || fail "attach over TCP ('$uri')"
URI=$uri LABEL=tcp
qio "what was kept is there" 'read -P 0x5a 1M 1M' 'read -P 0 0 1M'
exercise "$uri" "tcp"
LABEL=daemon
stop
ok "stops"

#!/usr/bin/env bash
# Real NBD clients through TLS: nbdinfo, nbdcopy, nbdsh, qemu-img and qemu-io, with certificates and with pre-shared keys;
# those who must not be let in; and a reload that takes a host away.
#
#   FOREBAY=PROGRAM nbd-tls.sh    starts daemons of its own
#
# Prints a line for each check, and ends with 1 at the first that fails, after what the client said.
set -uo pipefail
source "$(dirname "$0")/../lab/limits.sh"

WORK=$(mktemp -d "${TMPDIR:-/tmp}/nbd-tls.XXXXXX")
LABEL=nbd-tls
DAEMON=
PATIENCE=60
source "$(dirname "$0")/nbd-checks.sh"

logs() { # WHAT PATTERN: one line of the daemon's log
  local _
  for _ in {1..100}; do
    grep -Eq -- "$2" "$WORK/daemon.log" && { ok "$1"; return; }
    sleep 0.05
  done
  fail "$1 (no '$2' in the log)"
}
metric() { # NAME: its value
  curl -s --unix-socket "$FOREBAY_CONTROL" http://x/metrics | awk -v name="forebay_$1" '$1 == name { print $2 + 0 }'
}

for tool in nbdinfo nbdcopy qemu-img qemu-io certtool psktool curl python3; do
  command -v "$tool" >/dev/null || { echo "not ok $LABEL: $tool is not installed"; exit 1; }
done
[[ -n ${FOREBAY:-} ]] || { sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2; }
export FOREBAY_CONTROL=$WORK/control

# Authorities and certificates: DIR has what one side needs, under the names that QEMU and libnbd look for.
certificate() { # DIR ROLE AUTHORITY TEMPLATE...
  local dir=$1 role=$2 authority=$3
  shift 3
  mkdir -p "$dir"
  printf '%s\n' "$@" "tls_www_$role" signing_key encryption_key >"$WORK/template"
  (umask 077; certtool --generate-privkey --bits 2048 --outfile "$dir/$role-key.pem") 2>/dev/null
  certtool --generate-certificate --load-privkey "$dir/$role-key.pem" --load-ca-certificate "$authority/ca-cert.pem" \
    --load-ca-privkey "$authority/ca-key.pem" --template "$WORK/template" --outfile "$dir/$role-cert.pem" 2>"$WORK/out" ||
    fail "certtool"
  cp "$authority/ca-cert.pem" "$dir/ca-cert.pem"
}
for authority in authority other; do
  mkdir "$WORK/$authority"
  certtool --generate-privkey --bits 2048 --outfile "$WORK/$authority/ca-key.pem" 2>/dev/null
  printf 'cn = %s\nca\ncert_signing_key\n' "$authority" >"$WORK/template"
  certtool --generate-self-signed --load-privkey "$WORK/$authority/ca-key.pem" --template "$WORK/template" \
    --outfile "$WORK/$authority/ca-cert.pem" 2>"$WORK/out" || fail "certtool"
done
certificate "$WORK/server" server "$WORK/authority" 'cn = localhost' 'dns_name = localhost' 'ip_address = 127.0.0.1'
certificate "$WORK/one" client "$WORK/authority" 'cn = one' 'organization = Example'
certificate "$WORK/two" client "$WORK/authority" 'cn = two' 'organization = Example'
certificate "$WORK/stranger" client "$WORK/other" 'cn = one' 'organization = Example'
# Those trust the server's authority, but have a certificate of another, or none; the last trusts another authority.
cp "$WORK/authority/ca-cert.pem" "$WORK/stranger/ca-cert.pem"
mkdir "$WORK/none" "$WORK/distrust"
cp "$WORK/authority/ca-cert.pem" "$WORK/none/"
cp "$WORK/one/"client-* "$WORK/distrust/"
cp "$WORK/other/ca-cert.pem" "$WORK/distrust/"
(umask 077; psktool -u alice -p "$WORK/server.psk" -s 32; psktool -u bob -p "$WORK/server.psk" -s 32) >"$WORK/out" 2>&1 ||
  fail "psktool"
mkdir "$WORK/alice" "$WORK/mallory"
(umask 077; grep '^alice:' "$WORK/server.psk" >"$WORK/alice/keys.psk"
  printf 'alice:%064d\n' 7 >"$WORK/mallory/keys.psk")

configure() { # NAMES: who may connect with TLS; all if empty
  cat >"$WORK/forebay.toml" <<TOML
nbd = ["127.0.0.1:$PORT,tls=required", "127.0.0.1:$((PORT + 1)),tls=allowed", "unix:$WORK/nbd,tls=required"]
nbd-allow = ["${NETWORK:-127.0.0.0/8}"]
[nbd-tls]
credentials = "$WORK/server"
psk = "$WORK/server.psk"
names = [$1]
TOML
}
PORT=$((20000 + RANDOM % 12000))
configure ''
"$FOREBAY" serve --data "$WORK/data" --store-size 1G --config "$WORK/forebay.toml" >"$WORK/daemon.log" 2>&1 &
DAEMON=$!
for _ in {1..300}; do
  "$FOREBAY" status >/dev/null 2>&1 && break
  kill -0 "$DAEMON" 2>/dev/null || fail "the daemon is not ready"
  sleep 0.1
done
check "status" "$FOREBAY" status
says "it shows which addresses want TLS" "127.0.0.1:$PORT,tls=required, 127.0.0.1:$((PORT + 1)),tls=allowed"
check "create" "$FOREBAY" create ram/disk --size 64M
check "create" "$FOREBAY" create ram/mine --size 64M
check "attach" "$FOREBAY" attach ram/disk --nbd
says "its URI is one of TLS" "^nbds://127.0.0.1:$PORT/ram/disk$"
check "attach, for a host alone" "$FOREBAY" attach ram/mine --nbd --host CN=one,O=Example
check "targets" "$FOREBAY" targets --format json
says "a Unix socket has one, too" 'nbds\+unix:///ram/disk'

libnbd() { # WHO EXPORT [PORT]: its URI
  local with
  case $1 in
    alice | mallory) with="alice@127.0.0.1:${3:-$PORT}/$2?tls-psk-file=$WORK/$1/keys.psk" ;;
    *) with="127.0.0.1:${3:-$PORT}/$2?tls-certificates=$WORK/$1" ;;
  esac
  echo "nbds://$with"
}
# What QEMU's tools are given for a client; IMAGE is the node that they then open.
qemu() { # WHO EXPORT [PORT]
  case $1 in
    alice | mallory) OBJECT=tls-creds-psk,id=tls0,endpoint=client,dir=$WORK/$1,username=alice ;;
    # A certificate that QEMU would not show by itself is for the daemon to refuse.
    *) OBJECT=tls-creds-x509,id=tls0,endpoint=client,dir=$WORK/$1,sanity-check=off ;;
  esac
  IMAGE=driver=raw,file.driver=nbd,file.host=127.0.0.1,file.port=${3:-$PORT},file.export=$2,file.tls-creds=tls0
}

truncate -s 64M "$WORK/image"
for at in 0 5 33 61; do
  dd if=/dev/urandom of="$WORK/image" bs=1M count=3 seek="$at" conv=notrunc status=none
done
for who in one alice; do
  LABEL=$who
  uri=$(libnbd "$who" ram/disk)
  check "nbdinfo" nbdinfo "$uri"
  says "it is TLS" 'with TLS'
  check "nbdinfo --list" nbdinfo --list "$(libnbd "$who" '')"
  says "the export is listed" 'export="ram/disk"'
  check "nbdcopy to the volume" nbdcopy --flush --connections=4 "$WORK/image" "$uri"
  check "nbdcopy from the volume" nbdcopy "$uri" "$WORK/back"
  check "it is the same" cmp "$WORK/image" "$WORK/back"
  rm -f "$WORK/back"
  qemu "$who" ram/disk
  check "qemu-img convert from the volume" qemu-img convert --object "$OBJECT" --image-opts -O raw "$IMAGE" "$WORK/back"
  check "it is the same" cmp "$WORK/image" "$WORK/back"
  rm -f "$WORK/back"
  check "qemu-io" qemu-io --object "$OBJECT" --image-opts -c 'write -P 5 1M 20M' -c 'read -P 5 1M 20M' -c 'write -z 2M 2M' \
    -c 'discard 8M 4M' -c 'aio_write -P 6 30M 1M' -c 'aio_flush' -c 'read -P 6 30M 1M' -c 'read -P 0 2M 2M' "$IMAGE"
  ! grep -Eiq 'failed|error' "$WORK/out" || fail "qemu-io"
  check "where TLS is allowed" nbdinfo "$(libnbd "$who" ram/disk $((PORT + 1)))"
  says "it is TLS" 'with TLS'
done

LABEL=shell
python='
import nbd, sys
for uri in sys.argv[1:]:
    h = nbd.NBD()
    h.set_uri_allow_local_file(True)
    h.add_meta_context("base:allocation")
    h.connect_uri(uri)
    assert h.get_tls_negotiated() and h.get_structured_replies_negotiated()
    h.pwrite(b"x" * 100000, 12345, nbd.CMD_FLAG_FUA)
    assert h.pread(100000, 12345) == b"x" * 100000
    seen = []
    h.block_status(1 << 20, 0, lambda name, offset, runs, error: seen.append(runs))
    assert seen
    h.shutdown()
'
for interpreter in python3 /usr/bin/python3 ''; do
  [[ -n $interpreter ]] && "$interpreter" -c 'import nbd' 2>/dev/null && break
done
[[ -n $interpreter ]] || fail "python3-libnbd is not installed"
check "certificates, keys, a Unix socket" "$interpreter" -c "$python" "$(libnbd one ram/disk)" "$(libnbd alice ram/disk)" \
  "nbds+unix://alice@/ram/disk?socket=$WORK/nbd&tls-psk-file=$WORK/alice/keys.psk"

LABEL=refused
before=$(metric nbd_tls_failures_total)
for who in mallory stranger none distrust; do
  refused "$who" nbdinfo "$(libnbd $who ram/disk)"
  qemu $who ram/disk
  refused "$who, with QEMU" qemu-io --object "$OBJECT" --image-opts -c 'read 0 4k' "$IMAGE"
done
logs "a wrong key is logged" 'TLS handshake failed.*host=127.0.0.1.*does not have the key'
logs "a certificate of another authority is logged" 'TLS handshake failed.*untrusted'
logs "a host without a certificate is logged" 'TLS handshake failed.*sent no certificate'
# QEMU looks at the server's certificate when the handshake is over, and then it has not failed.
for _ in {1..100}; do
  failures=$(($(metric nbd_tls_failures_total) - before))
  ((failures < 7)) || break
  sleep 0.05
done
((failures == 7)) || fail "$failures of 7 failures are counted"
ok "failures are counted"
refused "a plain client" nbdinfo "nbd://127.0.0.1:$PORT/ram/disk"
says "it is told why" 'TLS|server policy'
refused "a plain client, with QEMU" qemu-img info "nbd://127.0.0.1:$PORT/ram/disk"
says "it is told why" 'TLS'
check "a plain client where TLS is allowed" nbdinfo "nbd://127.0.0.1:$((PORT + 1))/ram/disk"
says "it is not TLS" 'without TLS'

LABEL=hosts
check "an export for one host" nbdinfo "$(libnbd one ram/mine)"
for who in two alice; do
  refused "$who does not see it" nbdinfo "$(libnbd $who ram/mine)"
  says "as if it were not there" 'No such file or directory for export: ram/mine'
  check "$who lists exports" nbdinfo --list "$(libnbd $who '')"
  ! grep -q 'ram/mine' "$WORK/out" || fail "it is listed"
done
logs "a refused host is logged" 'host refused.*front="nbd".*host=127.0.0.1.*name=CN=two,O=Example.*export="ram/mine"'

LABEL=reload
check "one" nbdinfo "$(libnbd one ram/disk)"
configure '"two", "bob"'
check "reload" "$FOREBAY" reload
! [[ -s $WORK/out ]] || fail "reload asks for a restart"
refused "one is gone" nbdinfo "$(libnbd one ram/disk)"
refused "alice is gone" nbdinfo "$(libnbd alice ram/disk)"
check "two stays" nbdinfo "$(libnbd two ram/disk)"
logs "who is refused by name is logged" 'host refused.*name=CN=one,O=Example.*its name is not allowed'
NETWORK=192.0.2.0/24 configure ''
kill -HUP "$DAEMON"
for _ in {1..100}; do nbdinfo "$(libnbd two ram/disk)" >/dev/null 2>&1 || break; sleep 0.05; done
refused "a signal reloads, too: another network" nbdinfo "$(libnbd two ram/disk)"
logs "who is refused by address is logged" 'host refused.*its address is not allowed'
configure ''
mv "$WORK/server/server-key.pem" "$WORK/server/away"
refused "a key that is missing changes nothing" "$FOREBAY" reload
says "and is named" 'nothing has changed.*server-key.pem'
refused "still another network" nbdinfo "$(libnbd two ram/disk)"
# The authority changes hands: certificates of the old one are good no more.
mv "$WORK/server/away" "$WORK/server/server-key.pem"
cp "$WORK/other/ca-cert.pem" "$WORK/server/ca-cert.pem"
check "reload" "$FOREBAY" reload
check "a host of the new authority" nbdinfo "$(libnbd stranger ram/disk)"
refused "a host of the old one" nbdinfo "$(libnbd two ram/disk)"
(($(metric nbd_hosts_refused_total) >= 5)) || fail "refused hosts are counted"
coproc HELD {
  "$interpreter" -c 'import nbd, sys
h = nbd.NBD()
h.set_uri_allow_local_file(True)
h.connect_uri(sys.argv[1])
print("connected", flush=True)
sys.stdin.read()' "$(libnbd stranger ram/disk)" 2>"$WORK/out"
}
read -r line <&"${HELD[0]}" && [[ $line == connected ]] || fail "a connection that is held"
[[ $(metric nbd_tls_connections) == 1 ]] || fail "connections are counted"
ok "hosts and connections are counted"
exec {HELD[1]}>&-
wait "$HELD_PID"
kill -TERM "$DAEMON"
wait "$DAEMON" || fail "the daemon ended with $?"
DAEMON=
ok "stops"

#!/usr/bin/env bash
# CRUSH against Debian's crushtool: every kind of bucket, tunables of every age, every kind of step; over 100,000
# placements, each of which must be the same.
#
#   PROGRAM=.../rados-lab rados-crush.sh
#
# Prints a line for each kind of bucket.
set -uo pipefail

WORK=$(mktemp -d "${TMPDIR:-/tmp}/rados-crush.XXXXXX")
trap 'rm -rf "$WORK"' EXIT
cd "$WORK" || exit 1

fail() {
  echo "not ok rados-crush: $1"
  sed 's/^/  /' err 2>/dev/null | tail -n 10
  exit 1
}

LAST=${LAST:-499}
RULES=(
  "step chooseleaf firstn 0 type host"
  "step chooseleaf indep 0 type host"
  "step choose firstn 2 type rack;step chooseleaf firstn 2 type host"
  "step choose indep 2 type rack;step chooseleaf indep 2 type host"
  "step choose firstn 0 type osd"
  "step choose indep 0 type osd"
  "step set_choose_tries 100;step set_chooseleaf_tries 5;step chooseleaf indep 0 type rack"
  "step set_choose_local_tries 3;step set_choose_local_fallback_tries 3;step set_chooseleaf_vary_r 2;step chooseleaf firstn -1 type rack"
  "step set_chooseleaf_stable 0;step choose firstn 1 type rack;step choose firstn 0 type host;step choose firstn 1 type osd"
)
# Local tries, local fallback tries, total tries, descend once, vary r, stable: argonaut, bobtail, firefly, jewel, and
# a strange one.
TUNABLES=("2 5 19 0 0 0" "0 0 50 1 0 0" "0 0 50 1 1 0" "0 0 50 1 1 1" "3 0 7 0 4 1")

total=0
for alg in uniform list tree straw straw2; do
  crushtool -o base --build --num_osds 60 host $alg 4 rack $alg 5 root $alg 0 >err 2>&1 || fail "building $alg buckets"
  count=0
  for tunables in "${TUNABLES[@]}"; do
    read -r local fallback tries once vary stable <<<"$tunables"
    crushtool -i base -o tuned --enable-unsafe-tunables --set-choose-local-tries "$local" \
      --set-choose-local-fallback-tries "$fallback" --set-choose-total-tries "$tries" --set-chooseleaf-descend-once "$once" \
      --set-chooseleaf-vary-r "$vary" --set-chooseleaf-stable "$stable" >err 2>&1 || fail "tunables $tunables"
    crushtool -d tuned -o text 2>err || fail "decompiling"
    sed -i '/^# rules/,/^# end/d' text
    for rule in "${!RULES[@]}"; do
      printf 'rule r%s {\n id %s\n type replicated\n min_size 1\n max_size 10\n step take root\n%s\n step emit\n}\n' \
        "$rule" "$rule" "$(tr ';' '\n' <<<"${RULES[rule]}")" >>text
    done
    crushtool -c text -o map >err 2>&1 || fail "compiling the rules"
    for rule in "${!RULES[@]}"; do
      crushtool -i map --test --show-mappings --rule "$rule" --num-rep 4 --min-x 0 --max-x "$LAST" \
        --weight 3 0 --weight 7 0.5 --weight 20 0.1 --weight 41 0 2>err | grep '^CRUSH' >theirs
      "$PROGRAM" crush map "$rule" 4 0 "$LAST" 3=0 7=0.5 20=0.1 41=0 >ours 2>err || fail "$alg, tunables $tunables: rule $rule"
      [[ $(wc -l <theirs) -eq $((LAST + 1)) ]] || fail "crushtool placed $(wc -l <theirs) of $((LAST + 1))"
      diff ours theirs >err || fail "$alg, tunables $tunables, ${RULES[rule]}: placements differ"
      count=$((count + LAST + 1))
    done
  done
  total=$((total + count))
  echo "ok rados-crush: $alg buckets, $count placements the same"
done
echo "ok rados-crush: $total placements in all"

#!/usr/bin/env python3
"""Compares docs/rbd-commands.md with what `rbd help` and `forebay --help` say.

  rbd-commands.py FOREBAY PAGE

Every command of rbd has a row; of one that is carried out, every option is taken or named as not taken; others are refused.
Prints what does not fit, and exits with 1 then.
"""
import re
import subprocess
import sys


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False)


def commands():
    """Returns the commands of rbd. Long names wrap their descriptions onto the next line."""
    lines = output("rbd", "help").stdout.splitlines()
    found = (re.match(r" {4}([a-z][a-z -]*[a-z])(?: \(.*?\))?(?:  +\S.*)?$", line) for line in lines)
    return [match.group(1) for match in found if match]


def options(text):
    return set(re.findall(r"--([a-z][a-z-]*)", text))


def main():
    forebay, page = sys.argv[1:]
    text = open(page, encoding="utf-8").read()
    everywhere = options(text.split("\n## ")[0])
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 4:
            rows[cells[0].strip("`")] = cells[1:]
    wrong = []
    known = commands()
    if len(known) < 100:
        wrong.append(f"rbd help lists {len(known)} commands only")
    for name in known:
        row = rows.pop(name, None)
        if row is None:
            wrong.append(f"{name}: has no row")
            continue
        state, without, _ = row
        words = name.split()
        if state == "yes":
            theirs = output("rbd", "help", *words).stdout
            wanted = {a or b for a, b in re.findall(r"^  (?:-\w )?(?:\[ --([a-z-]+) \]|--([a-z-]+))", theirs, re.M)}
            help_text = output(forebay, *words, "--help")
            if help_text.returncode != 0:
                wrong.append(f"{name}: is not carried out")
                continue
            taken = options(help_text.stdout)
            named = options(without)
            for option in sorted(wanted - taken - named - everywhere):
                wrong.append(f"{name}: --{option} is neither taken nor named")
            for option in sorted(named & taken | named - wanted):
                wrong.append(f"{name}: --{option} is named, but taken, or not one of rbd's")
        else:
            refused = output(forebay, *words, "pool/image")
            if refused.returncode != 9 or "rbd" not in refused.stderr:
                wrong.append(f"{name}: is not refused by name ({refused.returncode}): {refused.stderr.strip()}")
    wrong += [f"{name}: is no command of rbd" for name in rows]
    print("\n".join(wrong) or f"{len(known)} commands")
    sys.exit(1 if wrong else 0)


main()

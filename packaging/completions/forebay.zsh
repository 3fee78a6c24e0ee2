#compdef forebay
# zsh completion of forebay.  The program itself says what fits, the names of images included: 'forebay __complete'
# prints a line that says whether files fit, then a line for each word: the word, a tab, what it means.

_forebay() {
  local program=${(Q)words[1]} line word
  local -a lines begun whole
  # Typed through an alias, or with a directory in a variable.
  whence -p -- "$program" >/dev/null || program=forebay
  lines=("${(@f)$("$program" __complete zsh -- "${(@Q)words[1,CURRENT]}" 2>/dev/null </dev/null)}")
  case $lines[1] in
    files) _files; return ;;
    dirs) _files -/; return ;;
  esac
  for line in "${(@)lines[2,-1]}"; do
    word=${line%%$'\t'*}
    # POOL/ and --option= are the beginning of a word.
    if [[ $word == *[/=] ]]; then
      begun+=("${${word//\\/\\\\}//:/\\:}:${line#*$'\t'}")
    else
      whole+=("${${word//\\/\\\\}//:/\\:}:${line#*$'\t'}")
    fi
  done
  _describe -t forebay 'forebay' begun -S '' -- whole
}

# Loaded from $fpath this file is the function's body; read with 'source' it has to be registered.
if [[ $funcstack[1] == _forebay ]]; then _forebay "$@"; else compdef _forebay forebay; fi

# bash completion of forebay.  The program itself says what fits, the names of images included: 'forebay __complete'
# prints a line that says whether files fit, then a line for each word, quoted for insertion.

_forebay() {
  local program=${COMP_WORDS[0]/#\~\//$HOME/} lines=()
  # Typed through an alias, or with a directory in a variable.
  type -P -- "$program" >/dev/null || program=forebay
  mapfile -t lines < <("$program" __complete bash -- "${COMP_WORDS[@]:0:COMP_CWORD+1}" 2>/dev/null </dev/null)
  COMPREPLY=("${lines[@]:1}")
  # compopt complains when a script calls this function by hand.
  case ${lines[0]-} in
    files) compopt -o default 2>/dev/null ;;
    dirs) compopt -o dirnames 2>/dev/null ;;
  esac
  # POOL/ and --option= are the beginning of a word.
  if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[/=] ]]; then compopt -o nospace 2>/dev/null; fi
}

complete -F _forebay forebay

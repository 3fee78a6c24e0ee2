# fish completion of forebay.  The program itself says what fits, the names of images included: 'forebay __complete'
# prints a line that says whether files fit, then a line for each word: the word, a tab, what it means.

function __forebay_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l program $words[1]
    # Typed through an abbreviation, or with a directory in a variable.
    type -q -- $program; or set program forebay
    set -l lines ($program __complete fish -- $words "$current" 2>/dev/null </dev/null)
    switch "$lines[1]"
        case files
            __fish_complete_path "$current"
        case dirs
            __fish_complete_directories "$current" ''
    end
    set -q lines[2]; and printf '%s\n' $lines[2..-1]
end

complete --command forebay --no-files --arguments '(__forebay_complete)'

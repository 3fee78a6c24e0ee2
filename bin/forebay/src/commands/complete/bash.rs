//! Words as bash has them: quoted as they are typed, and split at `:` and `=` too (`COMP_WORDBREAKS`).

/// The word to complete, as it is typed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Typed {
    /// Part of the word that bash splits off when it is unquoted; it is not inserted again.
    before: String,
    /// The quote that is open.
    quote: Option<char>,
}

impl Typed {
    /// Returns what bash inserts for a word, if it can be written behind what is typed.
    pub fn insertion(&self, word: &str) -> Option<String> {
        let rest = word.strip_prefix(&self.before)?;
        match self.quote {
            // bash closes the quote itself.
            Some('\'') => (!rest.contains('\'')).then(|| rest.to_owned()),
            Some(_) => (!rest.contains(['"', '$', '`', '\\', '!'])).then(|| rest.to_owned()),
            None => Some(escape(rest)),
        }
    }
}

/// Joins what bash has split, and takes the quotes off; the second is the last word as it is typed.
pub fn join(pieces: &[String]) -> (Vec<String>, Typed) {
    let is_break = |piece: &str| !piece.is_empty() && piece.chars().all(|c| c == ':' || c == '=');
    let mut words: Vec<String> = Vec::new();
    let mut typed = Typed::default();
    let mut glued = false;
    for piece in pieces {
        let (text, quote) = unquote(piece);
        let breaks = is_break(piece);
        // The program's name stands alone.
        if words.len() > 1 && (glued || breaks) {
            let last = words.last_mut().expect("more than one");
            // After a break bash inserts behind it.
            typed = Typed { before: if breaks { format!("{last}{text}") } else { last.clone() }, quote };
            last.push_str(&text);
        } else {
            words.push(text);
            typed = Typed { before: String::new(), quote };
        }
        glued = breaks;
    }
    (words, typed)
}

/// Takes quotes and backslashes off a word; says which quote is open at its end.
fn unquote(word: &str) -> (String, Option<char>) {
    let mut out = String::new();
    let mut quote = None;
    let mut chars = word.chars();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (None, '\'' | '"') => quote = Some(c),
            (Some(open), c) if open == c => quote = None,
            (None | Some('"'), '\\') => out.extend(chars.next()),
            (_, c) => out.push(c),
        }
    }
    (out, quote)
}

/// Writes a word for a shell.  Names may hold anything but spaces, and come from others: `$(reboot)` is one.
fn escape(word: &str) -> String {
    let mut out = String::new();
    for (at, c) in word.char_indices() {
        let plain = c.is_alphanumeric() || "-_./:=+,%^@".contains(c) || (c == '~' && at > 0) || !c.is_ascii();
        if !plain {
            out.push('\\');
        }
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joined(pieces: &[&str]) -> (Vec<String>, Typed) {
        join(&pieces.iter().map(|&piece| piece.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn what_bash_splits_is_one_word_again() {
        let (words, typed) = joined(&["forebay", "info", "local/a", ":", "b"]);
        assert_eq!(words, ["forebay", "info", "local/a:b"]);
        assert_eq!(typed.insertion("local/a:bc").as_deref(), Some("bc"));
        let (words, typed) = joined(&["forebay", "ls", "--format", "="]);
        assert_eq!(words, ["forebay", "ls", "--format="]);
        assert_eq!(typed.insertion("--format=json").as_deref(), Some("json"));
        let (words, typed) = joined(&["forebay", "ls", "--format", "=", "js"]);
        assert_eq!((words[2].as_str(), typed.insertion("--format=json").as_deref()), ("--format=js", Some("json")));
        let (words, _) = joined(&["forebay", "ls", "--data", "=", "/x", ""]);
        assert_eq!(words, ["forebay", "ls", "--data=/x", ""]);
    }

    #[test]
    fn nothing_of_a_name_is_run_by_the_shell() {
        let (_, typed) = joined(&["forebay", "info", "local/"]);
        assert_eq!(typed.insertion("local/$(x);`y`'\"").as_deref(), Some(r#"local/\$\(x\)\;\`y\`\'\""#));
        assert_eq!(typed.insertion("local/größe").as_deref(), Some("local/größe"));
        assert_eq!(escape("~x~"), "\\~x~");
    }

    #[test]
    fn an_open_quote_stays_open() {
        let (words, typed) = joined(&["forebay", "info", "'local/a"]);
        assert_eq!(words[2], "local/a");
        assert_eq!(typed.insertion("local/a$b").as_deref(), Some("local/a$b"));
        assert_eq!(typed.insertion("local/a'b"), None);
        let (words, typed) = joined(&["forebay", "info", r#""local/\$a"#]);
        assert_eq!(words[2], "local/$a");
        assert_eq!(typed.insertion("local/$(x)"), None);
        let (words, _) = joined(&["forebay", r"--data=a\ b", "x"]);
        assert_eq!(words[1], "--data=a b");
    }
}

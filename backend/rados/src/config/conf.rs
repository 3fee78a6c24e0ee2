//! Parser for `ceph.conf`: sections, settings and metavariables.

use std::collections::BTreeMap;

/// Maximum nesting depth of metavariables.
const DEPTH_MAX: u32 = 8;
/// Maximum number of replacements in one setting, over all depths; further ones are left as written.
const REPLACEMENTS_MAX: u32 = 256;
/// Maximum length in bytes of a setting that can be substituted by name.
const LENGTH_MAX: usize = 4096;

/// Settings of a configuration file, as seen by one client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conf {
    sections: BTreeMap<String, BTreeMap<String, String>>,
    cluster: String,
    id: String,
    host: String,
}

/// Normalizes the name of a setting: spaces, dashes and underscores are equivalent.
fn normal(name: &str) -> String {
    let words: Vec<&str> = name.split([' ', '\t', '-', '_']).filter(|word| !word.is_empty()).collect();
    words.join("_").to_ascii_lowercase()
}

/// Returns a line without its comment.
fn code(line: &str) -> &str {
    let mut quote = None;
    let mut before = None;
    for (at, c) in line.char_indices() {
        match (quote, c) {
            (Some(open), c) if c == open && before != Some('\\') => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => quote = Some(c),
            (None, '#' | ';') if before != Some('\\') => return &line[..at],
            (None, _) => {}
        }
        before = Some(c);
    }
    line
}

/// Returns a value without enclosing quotes and backslash escapes.
fn value(text: &str) -> Result<String, String> {
    let text = text.trim();
    let inner = match text.chars().next() {
        Some(quote @ ('"' | '\'')) => {
            let rest = &text[1..];
            let end = rest.rfind(quote).ok_or_else(|| format!("the quote {quote} is not closed"))?;
            if !rest[end + 1..].trim().is_empty() {
                return Err("there is something behind the closing quote".into());
            }
            &rest[..end]
        }
        _ => text,
    };
    let mut out = String::with_capacity(inner.len());
    let mut escaped = false;
    for c in inner.chars() {
        if escaped || c != '\\' {
            out.push(c);
        }
        escaped = !escaped && c == '\\';
    }
    Ok(out)
}

impl Conf {
    /// Parses a file. `Err` has the line number, counted from 1, and a description of the error.
    pub fn parse(text: &str, cluster: &str, id: &str, host: &str) -> Result<Self, (usize, String)> {
        let mut sections: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
        let mut section = "global".to_owned();
        let mut carried = String::new();
        let mut lines = text.lines().enumerate().peekable();
        while let Some((number, line)) = lines.next() {
            let wrong = |text: String| (number + 1, text);
            let mut line = code(line).trim_end();
            // A trailing backslash continues the line, unless it is the last one.
            if let Some(part) = line.strip_suffix('\\') {
                if lines.peek().is_some() {
                    carried.push_str(part);
                    continue;
                }
                line = part;
            }
            let whole = std::mem::take(&mut carried) + line;
            let line = whole.trim();
            if line.is_empty() {
                continue;
            }
            if let Some(rest) = line.strip_prefix('[') {
                let Some((name, "")) = rest.split_once(']').map(|(name, rest)| (name, rest.trim())) else {
                    return Err(wrong(format!("'{line}' is no section; write [NAME]")));
                };
                section = name.trim().to_owned();
                continue;
            }
            let Some((name, text)) = line.split_once('=') else {
                return Err(wrong(format!("'{line}' is no setting; write NAME = VALUE")));
            };
            if normal(name.trim()).is_empty() {
                return Err(wrong(format!("'{line}' sets nothing; write NAME = VALUE")));
            }
            let settings = sections.entry(section.clone()).or_default();
            settings.insert(normal(name), value(text).map_err(wrong)?);
        }
        Ok(Self { sections, cluster: cluster.into(), id: id.into(), host: host.into() })
    }

    /// Returns the name of this client: `client.ID`.
    pub fn name(&self) -> String {
        format!("client.{}", self.id)
    }

    /// Returns a setting from the most specific section for this client, with metavariables expanded.
    pub fn get(&self, name: &str) -> Option<String> {
        self.raw(name).map(|text| self.expand(text))
    }

    fn raw(&self, name: &str) -> Option<&str> {
        let own = self.name();
        let find = |section: &str| self.sections.get(section)?.get(name);
        [own.as_str(), "client", "global"].into_iter().find_map(find).map(String::as_str)
    }

    /// Expands metavariables in a text: `$cluster`, `$name`, other settings.
    pub fn expand(&self, text: &str) -> String {
        let mut left = REPLACEMENTS_MAX;
        self.replace(text, 0, &mut left)
    }

    /// Expands metavariables. `left` counts down over all depths, because settings that refer to each other repeatedly
    /// would grow without bound.
    fn replace(&self, text: &str, depth: u32, left: &mut u32) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(at) = rest.find('$') {
            out.push_str(&rest[..at]);
            let after = &rest[at + 1..];
            let (name, behind) = match after.strip_prefix('{').and_then(|inner| inner.split_once('}')) {
                Some((name, behind)) => (name, behind),
                None => {
                    let end = after.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(after.len());
                    after.split_at(end)
                }
            };
            match self.variable(name, depth, left) {
                Some(found) => out.push_str(&found),
                None => out.push_str(&rest[at..rest.len() - behind.len()]),
            }
            rest = behind;
        }
        out.push_str(rest);
        out
    }

    fn variable(&self, name: &str, depth: u32, left: &mut u32) -> Option<String> {
        *left = left.checked_sub(1)?;
        match name {
            "" => None,
            "cluster" => Some(self.cluster.clone()),
            "type" => Some("client".into()),
            "id" | "num" => Some(self.id.clone()),
            "name" => Some(self.name()),
            "host" => Some(self.host.clone()),
            // A setting that refers to itself is left as it is.
            _ if depth < DEPTH_MAX => {
                let text = self.raw(&normal(name)).filter(|text| text.len() <= LENGTH_MAX)?;
                Some(self.replace(text, depth + 1, left))
            }
            _ => None,
        }
    }

    /// Returns the `mon_addr` values of monitor sections (legacy notation).
    pub fn monitor_addrs(&self) -> Vec<String> {
        let monitors = self.sections.iter().filter(|(name, _)| name.starts_with("mon."));
        monitors.filter_map(|(_, settings)| settings.get("mon_addr").cloned()).collect()
    }
}

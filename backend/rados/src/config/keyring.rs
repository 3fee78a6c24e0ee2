//! Keyrings: a section each entity, with its key.

/// The key of an entity, `client.admin` for example, in base64; `None` when it has none here.  `Err` names the line,
/// counted from 1, and what is wrong with it.
pub fn find_key(text: &str, entity: &str) -> Result<Option<String>, (usize, String)> {
    let mut ours = false;
    let mut found = None;
    for (number, line) in text.lines().enumerate() {
        let line = line.split(['#', ';']).next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        if let Some(name) = line.strip_prefix('[') {
            let Some(name) = name.strip_suffix(']') else {
                return Err((number + 1, format!("'{line}' is no section; write [NAME]")));
            };
            ours = name.trim() == entity;
            continue;
        }
        let Some((name, value)) = line.split_once('=') else {
            // Not the line itself: it may be a key.
            return Err((number + 1, "this is neither a section nor a setting".into()));
        };
        if ours && name.trim() == "key" {
            found = Some(value.trim().trim_matches('"').to_owned());
        }
    }
    Ok(found)
}

//! Keyrings: one section per entity, with its key.

/// Returns the key of an entity, for example `client.admin`, in base64; `None` if the keyring has none.  `Err` has the
/// line number, counted from 1, and a description of the error.
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
            // Does not quote the line, which may be a key.
            return Err((number + 1, "this is neither a section nor a setting".into()));
        };
        if ours && name.trim() == "key" {
            found = Some(value.trim().trim_matches('"').to_owned());
        }
    }
    Ok(found)
}

//! Output of results: JSON with stable field names, or tables and lines of text.

use std::io::{self, Write};

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use serde::Serialize;

use crate::cli::{Format, GlobalArgs};
use crate::failure::{Failure, Result};

/// Output format of a command.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    format: Format,
    pretty: bool,
}

impl Output {
    /// Creates it from the command-line options.
    pub fn new(global: &GlobalArgs) -> Self {
        Self { format: global.format, pretty: global.pretty_format }
    }

    /// Creates it for a command line that could not be read.
    pub fn of_arguments(mut arguments: impl Iterator<Item = String>) -> Self {
        let is_json = arguments.any(|argument| argument == "json" || argument == "--format=json");
        Self { format: if is_json { Format::Json } else { Format::Plain }, pretty: false }
    }

    /// Returns whether JSON is requested.
    pub fn is_json(&self) -> bool {
        self.format == Format::Json
    }

    /// Prints `value` as JSON, or the text that `plain` makes of it.
    pub fn print<T: Serialize>(&self, value: &T, plain: impl FnOnce(&T) -> String) -> Result<()> {
        let mut text = match self.format {
            Format::Json => self.json(value)?,
            Format::Plain => plain(value),
        };
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        put(text.as_bytes())
    }

    fn json<T: Serialize>(&self, value: &T) -> Result<String> {
        let made = if self.pretty { serde_json::to_string_pretty(value) } else { serde_json::to_string(value) };
        made.map_err(|error| Failure::failed(format!("writing JSON: {error}")))
    }

    /// Writes a failure to standard error, as JSON if requested.
    pub fn complain(&self, failure: &Failure) {
        let text = match self.format {
            Format::Plain => format!("forebay: {failure}\n"),
            Format::Json => {
                let wrapped = serde_json::json!({ "error": failure });
                self.json(&wrapped).map_or_else(|_| format!("forebay: {failure}\n"), |text| text + "\n")
            }
        };
        // If standard error is closed too, the error cannot be reported.
        let _ = io::stderr().write_all(text.as_bytes());
    }
}

/// Writes to standard output.  A reader that has gone (`forebay ls | head -1`) is no failure.
pub fn put(bytes: &[u8]) -> Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::io(error, "writing to standard output"))
        }
        _ => Ok(()),
    }
}

/// Formats a table: a header, columns in `right` (numbers) right-aligned, the others left-aligned.
pub fn table(header: &[&str], right: &[usize], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header.to_vec());
    for row in rows {
        table.add_row(row);
    }
    for (at, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if right.contains(&at) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let text = table.to_string();
    text.lines().map(|line| line.trim_end()).collect::<Vec<_>>().join("\n")
}

/// Formats lines of `name: value`, with the values aligned in one column.
pub fn fields(rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0) + 1;
    rows.iter().map(|(name, value)| format!("{:<width$} {value}\n", format!("{name}:"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_align() {
        let rows = vec![vec!["a".into(), "1 GiB".into()], vec!["longer".into(), "10 MiB".into()]];
        assert_eq!(table(&["NAME", "SIZE"], &[1], rows), "NAME      SIZE\na        1 GiB\nlonger  10 MiB");
    }

    #[test]
    fn fields_align() {
        assert_eq!(fields(&[("size", "1".into()), ("objects", "2".into())]), "size:    1\nobjects: 2\n");
    }
}

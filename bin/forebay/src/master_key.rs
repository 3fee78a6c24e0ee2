//! Sources of the store's master key: a file, a command, or the environment.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

use forebay_store::MasterKey;
use serde::Deserialize;

use crate::config::absolute;
use crate::failure::{Failure, Result};

/// Maximum length of what a source has, in bytes.
const CONTENT_MAX: usize = 4096;

/// Place from which the master key is read.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum MasterKeySource {
    /// File with the key.
    File(PathBuf),
    /// Command of the shell that prints the key.
    Command(String),
    /// Environment variable that has the key, as hexadecimal digits.
    Env(String),
}

impl FromStr for MasterKeySource {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text.split_once(':') {
            Some(("file", path)) if !path.is_empty() => Ok(Self::File(path.into())),
            Some(("command", command)) if !command.is_empty() => Ok(Self::Command(command.into())),
            Some(("env", name)) if !name.is_empty() => Ok(Self::Env(name.into())),
            _ => Err(format!("'{text}' is not file:PATH, command:COMMAND or env:NAME")),
        }
    }
}

impl TryFrom<String> for MasterKeySource {
    type Error = String;

    fn try_from(text: String) -> std::result::Result<Self, String> {
        text.parse()
    }
}

impl fmt::Display for MasterKeySource {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(out, "file:{}", path.display()),
            Self::Command(command) => write!(out, "command:{command}"),
            Self::Env(name) => write!(out, "env:{name}"),
        }
    }
}

impl MasterKeySource {
    /// Returns the source with an absolute path.
    pub fn absolute(&self) -> Result<Self> {
        match self {
            Self::File(path) => Ok(Self::File(absolute(path)?)),
            other => Ok(other.clone()),
        }
    }

    /// Reads the key.
    ///
    /// # Errors
    /// When the source cannot be read, or has no key.
    pub fn load(&self) -> Result<MasterKey> {
        let content = match self {
            Self::File(path) => {
                warn_of_readers(path);
                std::fs::read(path)
                    .map_err(|error| Failure::io(error, format_args!("reading the master key {}", path.display())))?
            }
            Self::Command(command) => output_of(command)?,
            Self::Env(name) => match std::env::var(name) {
                Ok(value) => value.into_bytes(),
                Err(_) => {
                    return Err(Failure::invalid(format!("the environment has no {name}, which has the master key")));
                }
            },
        };
        let content = zeroize::Zeroizing::new(content);
        if content.len() > CONTENT_MAX {
            return Err(Failure::invalid(format!("{self} has {} bytes, which are no master key", content.len())));
        }
        MasterKey::parse(&content).map_err(|error| {
            Failure::invalid(format!("{self}: {error}")).hint("'forebay store key generate FILE' makes one")
        })
    }
}

fn output_of(command: &str) -> Result<Vec<u8>> {
    let ran = Command::new("sh").arg("-c").arg(command).output();
    let ran = ran.map_err(|error| Failure::io(error, format_args!("running '{command}' for the master key")))?;
    if !ran.status.success() {
        let said = String::from_utf8_lossy(&ran.stderr);
        let text = format!("'{command}', which has the master key, failed with {}: {}", ran.status, said.trim());
        return Err(Failure::failed(text));
    }
    Ok(ran.stdout)
}

/// Warns if others than the owner can read a key file.
fn warn_of_readers(path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let Ok(meta) = std::fs::metadata(path) else { return };
    if meta.is_file() && meta.permissions().mode() & 0o077 != 0 {
        tracing::warn!("others can read the master key {}; chmod 600 changes that", path.display());
    }
}

/// Creates a file with a random master key, readable by its owner only, and makes it durable.
///
/// # Errors
/// When the file exists, or cannot be written.
pub fn generate(path: &Path) -> Result<()> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let failed = |error| Failure::io(error, format_args!("writing the master key {}", path.display()));
    let mut bytes = zeroize::Zeroizing::new([0u8; 32]);
    aws_lc_rs::rand::fill(&mut bytes[..]).map_err(|_| Failure::failed("the system has no random numbers"))?;
    let digits: zeroize::Zeroizing<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>().into();
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(failed)?;
    file.write_all(digits.as_bytes())
        .and_then(|()| file.write_all(b"\n"))
        .and_then(|()| file.sync_all())
        .map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_parsed_as_they_are_shown() {
        for text in ["file:/etc/forebay/key", "command:vault read -field=key a:b", "env:KEY"] {
            assert_eq!(text.parse::<MasterKeySource>().expect(text).to_string(), text);
        }
        for text in ["", "/etc/key", "file:", "command:", "env:", "vault:x"] {
            assert!(text.parse::<MasterKeySource>().expect_err(text).contains("command:COMMAND"), "{text}");
        }
    }

    #[test]
    fn keys_come_from_files_and_commands_and_what_is_wrong_is_said() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("key");
        generate(&path).expect("a key");
        let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).expect("made").permissions());
        assert_eq!(mode & 0o777, 0o600);
        assert!(generate(&path).is_err(), "it is not overwritten");
        MasterKeySource::File(path.clone()).load().expect("a key");
        MasterKeySource::Command(format!("cat {}", path.display())).load().expect("a key");
        let failed = |source: MasterKeySource| source.load().map(drop).expect_err("no key").to_string();
        assert!(failed(MasterKeySource::File(dir.path().join("none"))).contains("none"));
        assert!(failed(MasterKeySource::Command("echo sealed >&2; exit 3".into())).contains("sealed"));
        assert!(failed(MasterKeySource::Command("echo short".into())).contains("64 hexadecimal digits"));
        assert!(failed(MasterKeySource::Env("FOREBAY_NO_SUCH_KEY".into())).contains("FOREBAY_NO_SUCH_KEY"));
    }
}

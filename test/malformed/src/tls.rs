//! A host's side of TLS over a blocking socket, which goes wrong where that is asked for.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;

use anyhow::{Context, Result};
use forebay_load::Dice;
use forebay_nvme_host::handshake::shake;
use forebay_nvmf::session::psk::TlsKey;
use forebay_tls::{Psk, Read as Opened, TlsSession, sealed_len};

use crate::LOOK;

/// Bytes of data in a record at most.
const RECORD_MAX: usize = 16 << 10;
/// Changes of keys in a row.
const KEY_CHANGES_MAX: usize = 40;

/// Under which of its names a host knows its key.
fn psk(key: &TlsKey, host: &str, subsystem: &str, dice: &mut Dice) -> Psk {
    let mut psks = key.psks(host, subsystem);
    let at = dice.below(psks.len());
    psks.swap_remove(at)
}

/// Hides bytes in a session's records, some of which go wrong; `None` when there is no session to hide them in.
///
/// # Errors
/// When a handshake in which nothing was harmed fails.
pub fn hide(
    stream: &mut TcpStream,
    (key, host, subsystem): (&TlsKey, &str, &str),
    dice: &mut Dice,
    bytes: &[u8],
) -> Result<Option<Vec<u8>>> {
    let mut session = TlsSession::connect(&[psk(key, host, subsystem, dice)])?;
    if dice.once_in(4) {
        // The other end may wait for what a harmed length promises.
        let patience = stream.read_timeout()?;
        stream.set_read_timeout(Some(LOOK))?;
        let harm = |bytes: &mut Vec<u8>| {
            let len = bytes.len();
            match dice.below(4) {
                _ if len == 0 => {}
                0 => bytes.truncate(dice.below(len)),
                _ => (0..1 + dice.below(3)).for_each(|_| bytes[dice.below(len)] = dice.roll() as u8),
            }
        };
        let _ = shake(stream, &mut session, &mut Vec::new(), harm);
        stream.set_read_timeout(patience)?;
        return Ok(None);
    }
    if !shake(stream, &mut session, &mut Vec::new(), |_| {}).context("a handshake")? {
        anyhow::bail!("a correct handshake fails");
    }
    let mut sealed = Vec::new();
    let mut seal = |plain: &[u8], update: bool| -> Result<()> {
        if update {
            session.update_keys()?;
        }
        let mut record = vec![0; sealed_len(plain.len())];
        let len = session.write(plain, &mut record)?;
        sealed.extend_from_slice(&record[..len]);
        Ok(())
    };
    let mut left = bytes;
    while !left.is_empty() {
        if dice.once_in(16) {
            // New keys again and again, with next to nothing under each.
            let changes = (1 + dice.below(KEY_CHANGES_MAX)).min(left.len());
            let (few, rest) = left.split_at(changes);
            few.iter().try_for_each(|byte| seal(&[*byte], true))?;
            left = rest;
        } else {
            let (now, rest) = left.split_at(left.len().min(1 + dice.below(RECORD_MAX)));
            seal(now, false)?;
            left = rest;
        }
    }
    if dice.once_in(4) && !sealed.is_empty() {
        let at = dice.below(sealed.len());
        match dice.below(4) {
            0 => sealed.truncate(at),
            1 => drop(sealed.splice(at..at, (0..1 + dice.below(64)).map(|_| dice.roll() as u8).collect::<Vec<_>>())),
            2 => sealed.extend_from_within(at..),
            _ => sealed[at] ^= 1 << dice.below(8),
        }
    }
    Ok(Some(sealed))
}

/// A stream, and the session within it, in which nothing goes wrong.
pub struct Secure {
    stream: TcpStream,
    session: TlsSession,
    input: Vec<u8>,
}

impl Secure {
    /// Performs the handshake of a session.
    pub fn agree(mut stream: TcpStream, key: &TlsKey, host: &str, subsystem: &str) -> Result<Self> {
        let mut session = TlsSession::connect(&key.psks(host, subsystem)[..1])?;
        let mut input = Vec::new();
        anyhow::ensure!(shake(&mut stream, &mut session, &mut input, |_| {})?, "no TLS with {host}");
        Ok(Self { stream, session, input })
    }
}

impl Read for Secure {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut left = &self.input[..];
            let read = self.session.read(&mut left, out).map_err(io::Error::other)?;
            let taken = self.input.len() - left.len();
            self.input.drain(..taken);
            match read {
                Opened::Data(len) => return Ok(len),
                Opened::Closed => return Ok(0),
                Opened::NeedInput => {}
            }
            let mut more = [0; 16 << 10];
            match self.stream.read(&mut more)? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                got => self.input.extend_from_slice(&more[..got]),
            }
        }
    }
}

impl Write for Secure {
    fn write(&mut self, plain: &[u8]) -> io::Result<usize> {
        let mut record = vec![0; sealed_len(plain.len())];
        let len = self.session.write(plain, &mut record).map_err(io::Error::other)?;
        self.stream.write_all(&record[..len])?;
        Ok(plain.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

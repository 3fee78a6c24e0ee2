//! A small NBD client, written apart from the server on purpose: what one misunderstands the other does not repeat.

use std::collections::BTreeMap;
use std::io::{BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

const INIT: u64 = 0x4e42_444d_4147_4943;
const OPTION: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
const REQUEST: u32 = 0x2560_9513;
const SIMPLE_REPLY: u32 = 0x6744_6698;

const OPT_GO: u32 = 7;
const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const INFO_EXPORT: u16 = 0;

const CMD_READ: u16 = 0;
const CMD_WRITE: u16 = 1;
const CMD_FLUSH: u16 = 3;
const CMD_TRIM: u16 = 4;
const CMD_WRITE_ZEROES: u16 = 6;
const FLAG_FUA: u16 = 1;

/// A connection with requests in flight.
pub struct Client {
    input: BufReader<UnixStream>,
    output: UnixStream,
    size: u64,
    next: u64,
    /// Reads in flight: how many bytes each brings.
    reads: BTreeMap<u64, usize>,
}

/// The answer to one request.
pub struct Answer {
    /// Which request.
    pub handle: u64,
    /// NBD's error number; 0 when it was done.
    pub error: u32,
    /// Data read.
    pub data: Vec<u8>,
}

impl Client {
    /// Connects to `export` over a Unix socket.
    pub fn connect(socket: &Path, export: &str) -> Result<Self> {
        let output = UnixStream::connect(socket).with_context(|| format!("cannot connect to {}", socket.display()))?;
        output.set_read_timeout(Some(Duration::from_secs(300)))?;
        let mut input = BufReader::with_capacity(256 << 10, output.try_clone()?);
        ensure!(u64_from(&mut input)? == INIT && u64_from(&mut input)? == OPTION, "not a newstyle server");
        let flags = u16_from(&mut input)?;
        ensure!(flags & 3 == 3, "the server lacks fixed newstyle or no-zeroes: {flags:#x}");
        let mut hello = Vec::new();
        hello.extend(3u32.to_be_bytes());
        hello.extend(OPTION.to_be_bytes());
        hello.extend(OPT_GO.to_be_bytes());
        hello.extend((6 + export.len() as u32).to_be_bytes());
        hello.extend((export.len() as u32).to_be_bytes());
        hello.extend(export.as_bytes());
        hello.extend(0u16.to_be_bytes());
        (&output).write_all(&hello)?;
        let mut size = None;
        loop {
            ensure!(u64_from(&mut input)? == OPTION_REPLY, "not a reply to an option");
            ensure!(u32_from(&mut input)? == OPT_GO, "a reply to another option");
            let kind = u32_from(&mut input)?;
            let length = u32_from(&mut input)?;
            ensure!(length <= 64 << 10, "a reply of {length} bytes");
            let body = bytes_from(&mut input, length as usize)?;
            match kind {
                REP_ACK => break,
                REP_INFO if body.len() >= 10 && body[..2] == INFO_EXPORT.to_be_bytes() => {
                    size = Some(u64::from_be_bytes(body[2..10].try_into()?));
                }
                REP_INFO => {}
                _ => bail!("{export} is refused: {kind:#x} {}", String::from_utf8_lossy(&body)),
            }
        }
        let size = size.context("the server told no size")?;
        Ok(Self { input, output, size, next: 1, reads: BTreeMap::new() })
    }

    /// Sets the time after which waiting for an answer fails.
    pub fn set_patience(&self, patience: Duration) -> Result<()> {
        Ok(self.output.set_read_timeout(Some(patience))?)
    }

    /// Keeps the connection, and nothing else: one descriptor, no buffers.
    pub fn into_stream(self) -> UnixStream {
        self.output
    }

    /// The volume's bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Sends a read; its handle comes back with the answer.
    pub fn read(&mut self, offset: u64, length: usize) -> Result<u64> {
        let handle = self.send(CMD_READ, 0, offset, length, &[])?;
        self.reads.insert(handle, length);
        Ok(handle)
    }

    /// Sends a write.
    pub fn write(&mut self, offset: u64, data: &[u8], fua: bool) -> Result<u64> {
        self.send(CMD_WRITE, if fua { FLAG_FUA } else { 0 }, offset, data.len(), data)
    }

    /// Sends a write of zeroes.
    pub fn write_zeroes(&mut self, offset: u64, length: usize) -> Result<u64> {
        self.send(CMD_WRITE_ZEROES, 0, offset, length, &[])
    }

    /// Sends a discard.
    pub fn discard(&mut self, offset: u64, length: usize) -> Result<u64> {
        self.send(CMD_TRIM, 0, offset, length, &[])
    }

    /// Sends a flush.
    pub fn flush(&mut self) -> Result<u64> {
        self.send(CMD_FLUSH, 0, 0, 0, &[])
    }

    fn send(&mut self, command: u16, flags: u16, offset: u64, length: usize, data: &[u8]) -> Result<u64> {
        let handle = self.next;
        self.next += 1;
        let mut frame = Vec::with_capacity(28 + data.len());
        frame.extend(REQUEST.to_be_bytes());
        frame.extend(flags.to_be_bytes());
        frame.extend(command.to_be_bytes());
        frame.extend(handle.to_be_bytes());
        frame.extend(offset.to_be_bytes());
        frame.extend((length as u32).to_be_bytes());
        frame.extend(data);
        self.output.write_all(&frame)?;
        Ok(handle)
    }

    /// Waits for the next answer, whichever request it is for.
    pub fn answer(&mut self) -> Result<Answer> {
        ensure!(u32_from(&mut self.input)? == SIMPLE_REPLY, "not a simple reply");
        let error = u32_from(&mut self.input)?;
        let handle = u64_from(&mut self.input)?;
        let length = self.reads.remove(&handle).unwrap_or(0);
        let data = if error == 0 { bytes_from(&mut self.input, length)? } else { Vec::new() };
        Ok(Answer { handle, error, data })
    }
}

fn bytes_from(input: &mut impl Read, length: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    input.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn u16_from(input: &mut impl Read) -> Result<u16> {
    Ok(u16::from_be_bytes(bytes_from(input, 2)?.try_into().expect("two bytes")))
}

fn u32_from(input: &mut impl Read) -> Result<u32> {
    Ok(u32::from_be_bytes(bytes_from(input, 4)?.try_into().expect("four bytes")))
}

fn u64_from(input: &mut impl Read) -> Result<u64> {
    Ok(u64::from_be_bytes(bytes_from(input, 8)?.try_into().expect("eight bytes")))
}

//! A small blocking HTTP/1.1 client over a Unix socket: one request a connection, chunked bodies both ways.
//!
//! Why not a crate: docs/decisions/0006-control-plane.md.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Longest head of an answer, in bytes.
const HEAD_LEN_MAX: usize = 16 * 1024;

/// Most header fields in an answer.
const HEADERS_MAX: usize = 32;

/// Longest line before a chunk, in bytes: sixteen digits, extensions, which are not used, and the line's end.
const CHUNK_LINE_LEN_MAX: usize = 256;

/// A request whose answer has not been read yet.
pub struct SentRequest {
    stream: UnixStream,
}

/// An answer; its body is what [`Read`] gives.
#[derive(Debug)]
pub struct Response {
    /// The status, 200 and so on.
    pub status: u16,
    reader: BufReader<UnixStream>,
    framing: Framing,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Framing {
    /// Bytes left of a body of known length.
    Length(u64),
    /// Bytes left of the current chunk; the next chunk's line follows when there are none.
    Chunk {
        left: u64,
        first: bool,
    },
    /// Until the connection ends.
    ToEnd,
    Done,
}

impl SentRequest {
    /// Connects and sends a request with a body of known length.
    pub fn send(socket: &Path, method: &str, target: &str, body: Option<&[u8]>) -> io::Result<Self> {
        let mut stream = UnixStream::connect(socket)?;
        let mut head = head(method, target);
        if let Some(body) = body {
            head.push_str(&format!("content-type: application/json\r\ncontent-length: {}\r\n", body.len()));
        }
        head.push_str("\r\n");
        let mut bytes = head.into_bytes();
        bytes.extend_from_slice(body.unwrap_or_default());
        stream.write_all(&bytes)?;
        Ok(Self { stream })
    }

    /// Waits for the answer's head; `timeout` bounds each wait for bytes of the answer, its body's too.
    pub fn response(self, timeout: Option<Duration>) -> io::Result<Response> {
        self.stream.set_read_timeout(timeout)?;
        read_response(BufReader::new(self.stream))
    }
}

/// A request whose body is being written, in chunks.
pub struct Upload {
    stream: UnixStream,
}

/// Response of the server to the head of an upload.
pub enum Begun {
    /// Server accepts the body.
    Upload(Upload),
    /// Server has already responded, usually with an error.
    Answered(Response),
}

impl Upload {
    /// Connects, sends the head, and waits until the other side wants the body.
    pub fn begin(socket: &Path, method: &str, target: &str) -> io::Result<Begun> {
        let mut stream = UnixStream::connect(socket)?;
        let mut head = head(method, target);
        head.push_str("content-type: application/vnd.forebay.diff\r\ntransfer-encoding: chunked\r\n");
        head.push_str("expect: 100-continue\r\n\r\n");
        stream.write_all(head.as_bytes())?;
        // The interim answer is read without buffering past it: nothing follows it before the body is sent.
        let mut reader = BufReader::new(stream.try_clone()?);
        let (status, framing) = read_head(&mut reader)?;
        if status == 100 {
            return Ok(Begun::Upload(Upload { stream }));
        }
        Ok(Begun::Answered(Response { status, reader, framing }))
    }

    /// Sends one chunk.
    pub fn write(&mut self, parts: &[&[u8]]) -> io::Result<()> {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        if len == 0 {
            return Ok(());
        }
        self.stream.write_all(format!("{len:x}\r\n").as_bytes())?;
        for part in parts {
            self.stream.write_all(part)?;
        }
        self.stream.write_all(b"\r\n")
    }

    /// Ends the body and waits for the answer.
    pub fn finish(mut self) -> io::Result<Response> {
        // A server that has stopped reading has still sent a response.
        let ended = self.stream.write_all(b"0\r\n\r\n");
        self.answer().map_err(|error| ended.err().unwrap_or(error))
    }

    /// Waits for the answer without ending the body: the other side has stopped reading.
    pub fn answer(self) -> io::Result<Response> {
        read_response(BufReader::new(self.stream))
    }
}

impl Read for Response {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        loop {
            match self.framing {
                Framing::Done => return Ok(0),
                Framing::ToEnd => return self.reader.read(out),
                Framing::Length(0) => self.framing = Framing::Done,
                Framing::Length(left) => {
                    let got = self.read_up_to(left, out)?;
                    self.framing = Framing::Length(left - got as u64);
                    return Ok(got);
                }
                Framing::Chunk { left: 0, first } => {
                    if !first && !line(&mut self.reader)?.is_empty() {
                        return Err(bad("a chunk without its end"));
                    }
                    let text = line(&mut self.reader)?;
                    let digits = text.split(';').next().unwrap_or_default().trim();
                    let left = u64::from_str_radix(digits, 16).map_err(|_| bad("a chunk without a length"))?;
                    if left == 0 {
                        while !line(&mut self.reader)?.is_empty() {}
                        self.framing = Framing::Done;
                    } else {
                        self.framing = Framing::Chunk { left, first: false };
                    }
                }
                Framing::Chunk { left, first } => {
                    let got = self.read_up_to(left, out)?;
                    self.framing = Framing::Chunk { left: left - got as u64, first };
                    return Ok(got);
                }
            }
        }
    }
}

impl Response {
    fn read_up_to(&mut self, left: u64, out: &mut [u8]) -> io::Result<usize> {
        let want = out.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        match self.reader.read(&mut out[..want])? {
            0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the reply is truncated")),
            got => Ok(got),
        }
    }
}

fn head(method: &str, target: &str) -> String {
    format!("{method} {target} HTTP/1.1\r\nhost: forebay\r\nconnection: close\r\naccept: application/x-ndjson\r\n")
}

fn bad(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the reply is not HTTP: {what}"))
}

/// A line without its end, bounded.
fn line(reader: &mut impl BufRead) -> io::Result<String> {
    let mut bytes = Vec::new();
    reader.by_ref().take(CHUNK_LINE_LEN_MAX as u64).read_until(b'\n', &mut bytes)?;
    match bytes.strip_suffix(b"\r\n") {
        Some(text) => String::from_utf8(text.to_vec()).map_err(|_| bad("a line that is no text")),
        None if bytes.len() < CHUNK_LINE_LEN_MAX => {
            Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the reply is truncated"))
        }
        None => Err(bad("an endless line")),
    }
}

fn read_response(mut reader: BufReader<UnixStream>) -> io::Result<Response> {
    loop {
        let (status, framing) = read_head(&mut reader)?;
        if status >= 200 {
            return Ok(Response { status, reader, framing });
        }
    }
}

fn read_head(reader: &mut impl BufRead) -> io::Result<(u16, Framing)> {
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"\r\n\r\n") {
        let before = bytes.len();
        let room = (HEAD_LEN_MAX - before) as u64;
        reader.by_ref().take(room).read_until(b'\n', &mut bytes)?;
        if bytes.len() == before {
            return Err(if room == 0 {
                bad("an endless head")
            } else {
                io::Error::new(io::ErrorKind::UnexpectedEof, "the connection was closed before a reply")
            });
        }
    }
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut parsed = httparse::Response::new(&mut headers);
    match parsed.parse(&bytes) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) => return Err(bad("half a head")),
        Err(error) => return Err(bad(&error.to_string())),
    }
    let status = parsed.code.ok_or_else(|| bad("no status"))?;
    let field = |name: &str| {
        let found = parsed.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name))?;
        std::str::from_utf8(found.value).ok()
    };
    let framing = if status < 200 || status == 204 {
        Framing::Done
    } else if field("transfer-encoding").is_some_and(|value| value.eq_ignore_ascii_case("chunked")) {
        Framing::Chunk { left: 0, first: true }
    } else if let Some(length) = field("content-length") {
        Framing::Length(length.parse().map_err(|_| bad("a length that is no number"))?)
    } else {
        Framing::ToEnd
    };
    Ok((status, framing))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decoding of a response's bytes.
    fn answer(bytes: &[u8]) -> io::Result<(u16, Vec<u8>)> {
        let (near, mut far) = UnixStream::pair()?;
        far.write_all(bytes)?;
        drop(far);
        let mut response = read_response(BufReader::new(near))?;
        let mut body = Vec::new();
        response.read_to_end(&mut body)?;
        Ok((response.status, body))
    }

    #[test]
    fn the_three_framings() {
        let length = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhelloXX";
        assert_eq!(answer(length).expect("length"), (200, b"hello".to_vec()));
        let chunked =
            b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\n\r\n";
        assert_eq!(answer(chunked).expect("chunked"), (404, b"hello".to_vec()));
        let to_end = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\nhello";
        assert_eq!(answer(to_end).expect("to the end"), (200, b"hello".to_vec()));
    }

    #[test]
    fn what_is_cut_short_or_no_http_is_an_error() {
        for bytes in [
            &b""[..],
            b"HTTP/1.1 200 OK\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhell",
            b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhell",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhelloXX",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
            b"SSH-2.0-OpenSSH\r\n\r\n",
        ] {
            assert!(answer(bytes).is_err(), "{}", String::from_utf8_lossy(bytes));
        }
        assert!(answer(&[b'x'; HEAD_LEN_MAX + 1]).is_err());
    }
}

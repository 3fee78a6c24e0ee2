//! TLS handshake over a blocking socket.

use std::io::{self, Read, Write};
use std::net::TcpStream;

use forebay_tls::TlsSession;

/// Runs a handshake until both sides have finished; false when it fails.  `harm` may corrupt the sent bytes.
///
/// # Errors
/// Of the socket.
pub fn shake(
    stream: &mut TcpStream,
    session: &mut TlsSession,
    input: &mut Vec<u8>,
    mut harm: impl FnMut(&mut Vec<u8>),
) -> io::Result<bool> {
    let mut output = Vec::new();
    loop {
        let mut left = &input[..];
        let result = session.handshake(&mut left, &mut output);
        let taken = input.len() - left.len();
        input.drain(..taken);
        harm(&mut output);
        stream.write_all(&output)?;
        output.clear();
        match result {
            Ok(true) => return Ok(true),
            Ok(false) => {}
            Err(_) => return Ok(false),
        }
        let mut more = [0; 4096];
        let got = stream.read(&mut more)?;
        if got == 0 {
            return Ok(false);
        }
        input.extend_from_slice(&more[..got]);
    }
}

//! Client's side of the handshake, for a socket that the kernel gets: fixed newstyle, `NBD_OPT_GO`, simple replies.
//!
//! ```text
//! GREETING -> (flags and GO are sent) -> REPLY <-> DATA -> done
//! ```

use thiserror::Error;
use zerocopy::{FromBytes, IntoBytes};

use crate::wire::{self, Greeting, InfoBlockSize, InfoExport, OptionHeader, OptionReply, handshake, info, option, rep};

/// Maximum bytes of data of a reply to an option; servers send a few dozen.
const DATA_LEN_MAX: usize = 64 << 10;
/// Maximum number of replies to the option.
const REPLIES_MAX: usize = 64;

/// Export as the server describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NegotiatedExport {
    /// Size in bytes.
    pub size: u64,
    /// Transmission flags, of [`wire::transmission`].
    pub flags: u16,
    /// Minimum block size in bytes.
    pub block_min: u32,
}

/// Reason why a handshake has failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ClientHandshakeError {
    /// Not a server of the fixed newstyle protocol.
    #[error("the server does not speak the fixed newstyle protocol of NBD")]
    NotNbd,
    /// Refusal by the server, with its text.
    #[error("the server refuses the export: {0}")]
    Refused(String),
    /// Unknown export, or not for this host.
    #[error("the server has no such export for this host")]
    Unknown,
    /// Message that does not follow the protocol.
    #[error("malformed reply of the server")]
    Malformed,
}

/// Next step of a handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HandshakeStep {
    /// Receive exactly this many bytes, and pass them to [`ClientHandshake::received`].
    Receive(usize),
    /// Send these bytes.
    Send(Vec<u8>),
    /// Transmission begins; the socket has nothing else of the handshake.
    Done(NegotiatedExport),
}

enum HandshakeState {
    Greeting,
    Flags,
    Reply,
    Data { kind: u32, len: usize },
    Done,
}

/// Handshake of one connection; does no I/O.
pub struct ClientHandshake {
    export: String,
    state: HandshakeState,
    replies: usize,
    info: Option<(u64, u16)>,
    block_min: u32,
}

impl ClientHandshake {
    /// Creates a handshake for an export.
    pub fn new(export: impl Into<String>) -> Self {
        let export = export.into();
        Self { export, state: HandshakeState::Greeting, replies: 0, info: None, block_min: 1 }
    }

    /// Returns the next step; after [`HandshakeStep::Send`] it is called again.
    ///
    /// # Errors
    /// If the server has not described the export before it ended the negotiation.
    pub fn step(&mut self) -> Result<HandshakeStep, ClientHandshakeError> {
        Ok(match self.state {
            HandshakeState::Greeting => HandshakeStep::Receive(size_of::<Greeting>()),
            HandshakeState::Flags => {
                self.state = HandshakeState::Reply;
                HandshakeStep::Send(self.flags_and_go())
            }
            HandshakeState::Reply => HandshakeStep::Receive(size_of::<OptionReply>()),
            HandshakeState::Data { len, .. } => HandshakeStep::Receive(len),
            HandshakeState::Done => {
                let (size, flags) = self.info.ok_or(ClientHandshakeError::Malformed)?;
                HandshakeStep::Done(NegotiatedExport { size, flags, block_min: self.block_min })
            }
        })
    }

    /// Takes the bytes that [`HandshakeStep::Receive`] asked for.
    ///
    /// # Errors
    /// If the server refuses, or the bytes do not follow the protocol.
    pub fn received(&mut self, bytes: &[u8]) -> Result<(), ClientHandshakeError> {
        match self.state {
            HandshakeState::Greeting => {
                let greeting = Greeting::read_from_bytes(bytes).map_err(|_| ClientHandshakeError::Malformed)?;
                let magic = (greeting.magic.get(), greeting.option_magic.get());
                if magic != (wire::GREETING_MAGIC, wire::OPTION_MAGIC)
                    || greeting.flags.get() & handshake::FIXED_NEWSTYLE == 0
                {
                    return Err(ClientHandshakeError::NotNbd);
                }
                self.state = HandshakeState::Flags;
            }
            HandshakeState::Reply => {
                let reply = OptionReply::read_from_bytes(bytes).map_err(|_| ClientHandshakeError::Malformed)?;
                let len = usize::try_from(reply.len.get()).ok().filter(|&len| len <= DATA_LEN_MAX);
                self.replies += 1;
                let valid = reply.magic.get() == wire::OPTION_REPLY_MAGIC
                    && reply.option.get() == option::GO
                    && self.replies <= REPLIES_MAX;
                let len = len.filter(|_| valid).ok_or(ClientHandshakeError::Malformed)?;
                self.state = HandshakeState::Data { kind: reply.kind.get(), len };
                if len == 0 {
                    return self.received(&[]);
                }
            }
            HandshakeState::Data { kind, .. } => {
                self.state = HandshakeState::Reply;
                match kind {
                    rep::ACK => self.state = HandshakeState::Done,
                    rep::INFO => self.take_info(bytes)?,
                    rep::ERR_UNKNOWN => return Err(ClientHandshakeError::Unknown),
                    _ => return Err(ClientHandshakeError::Refused(refusal(kind, bytes))),
                }
            }
            HandshakeState::Flags | HandshakeState::Done => return Err(ClientHandshakeError::Malformed),
        }
        Ok(())
    }

    /// Takes a property of the export; those that are not needed are ignored.
    fn take_info(&mut self, bytes: &[u8]) -> Result<(), ClientHandshakeError> {
        let kind = bytes.first_chunk().map(|&kind| u16::from_be_bytes(kind)).ok_or(ClientHandshakeError::Malformed)?;
        match kind {
            info::EXPORT => {
                let export = InfoExport::read_from_bytes(bytes).map_err(|_| ClientHandshakeError::Malformed)?;
                self.info = Some((export.size.get(), export.flags.get()));
            }
            info::BLOCK_SIZE => {
                let sizes = InfoBlockSize::read_from_bytes(bytes).map_err(|_| ClientHandshakeError::Malformed)?;
                self.block_min = sizes.minimum.get();
            }
            _ => {}
        }
        Ok(())
    }

    /// Returns the client's flags, and the option GO with a query of the block sizes.
    fn flags_and_go(&self) -> Vec<u8> {
        let mut data = Vec::new();
        data.extend((self.export.len() as u32).to_be_bytes());
        data.extend(self.export.as_bytes());
        data.extend(1_u16.to_be_bytes());
        data.extend(info::BLOCK_SIZE.to_be_bytes());
        let header = OptionHeader {
            magic: wire::OPTION_MAGIC.into(),
            option: option::GO.into(),
            len: (data.len() as u32).into(),
        };
        let flags = u32::from(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES).to_be_bytes();
        [&flags[..], header.as_bytes(), &data].concat()
    }
}

/// Describes a refusal: the server's text, or the code.
fn refusal(kind: u32, text: &[u8]) -> String {
    match (kind, text) {
        (rep::ERR_TLS_REQD, _) => "it requires TLS, which the kernel's client does not speak".into(),
        (_, []) => format!("code {kind:#x}"),
        _ => String::from_utf8_lossy(text).chars().filter(|c| !c.is_control()).take(200).collect(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn greeting(flags: u16) -> Vec<u8> {
        [&wire::GREETING_MAGIC.to_be_bytes()[..], &wire::OPTION_MAGIC.to_be_bytes(), &flags.to_be_bytes()].concat()
    }

    fn reply(kind: u32, data: &[u8]) -> Vec<u8> {
        let header = OptionReply {
            magic: wire::OPTION_REPLY_MAGIC.into(),
            option: option::GO.into(),
            kind: kind.into(),
            len: (data.len() as u32).into(),
        };
        [header.as_bytes(), data].concat()
    }

    /// Runs a handshake against bytes of a server; returns what was sent, and the outcome.
    fn run(server: &[u8]) -> (Vec<u8>, Result<Option<NegotiatedExport>, ClientHandshakeError>) {
        let (mut handshake, mut sent, mut rest) = (ClientHandshake::new("local/x"), Vec::new(), server);
        loop {
            let result = match handshake.step() {
                Ok(HandshakeStep::Send(bytes)) => {
                    sent.extend(bytes);
                    Ok(())
                }
                Ok(HandshakeStep::Receive(len)) => match rest.split_at_checked(len) {
                    Some((now, later)) => {
                        rest = later;
                        handshake.received(now)
                    }
                    None => return (sent, Ok(None)),
                },
                Ok(HandshakeStep::Done(export)) => return (sent, Ok(Some(export))),
                Err(error) => Err(error),
            };
            if let Err(error) = result {
                return (sent, Err(error));
            }
        }
    }

    #[test]
    fn an_export_is_negotiated() {
        let export = [&info::EXPORT.to_be_bytes()[..], &(1_u64 << 30).to_be_bytes(), &0x10d_u16.to_be_bytes()].concat();
        let sizes = [&info::BLOCK_SIZE.to_be_bytes()[..], &512_u32.to_be_bytes(), &[0; 8]].concat();
        let name = [&info::NAME.to_be_bytes()[..], b"local/x"].concat();
        let server = [
            greeting(3),
            reply(rep::INFO, &export),
            reply(rep::INFO, &name),
            reply(rep::INFO, &sizes),
            reply(rep::ACK, &[]),
        ];
        let (sent, result) = run(&server.concat());
        let want = NegotiatedExport { size: 1 << 30, flags: 0x10d, block_min: 512 };
        assert_eq!(result, Ok(Some(want)));
        assert_eq!(sent[..4], [0, 0, 0, 3]);
        assert!(sent.ends_with(b"\0\0\0\x07local/x\0\x01\0\x03"), "{sent:?}");
    }

    #[test]
    fn refusals_are_told_apart() {
        let refused = |kind, text: &[u8]| run(&[greeting(3), reply(kind, text)].concat()).1;
        assert_eq!(refused(rep::ERR_UNKNOWN, b"no"), Err(ClientHandshakeError::Unknown));
        assert_eq!(refused(rep::ERR_POLICY, b"not\nyou"), Err(ClientHandshakeError::Refused("notyou".into())));
        assert!(
            matches!(refused(rep::ERR_TLS_REQD, b""), Err(ClientHandshakeError::Refused(text)) if text.contains("TLS"))
        );
        assert_eq!(refused(rep::ACK, b""), Err(ClientHandshakeError::Malformed), "nothing was described");
        assert_eq!(run(&greeting(0)).1, Err(ClientHandshakeError::NotNbd));
        assert_eq!(run(&[7; 18]).1, Err(ClientHandshakeError::NotNbd));
    }

    proptest! {
        #[test]
        fn foreign_bytes_end_a_handshake(
            kinds in proptest::collection::vec((any::<u8>(), proptest::collection::vec(any::<u8>(), 0..40)), 0..100),
            tail in proptest::collection::vec(any::<u8>(), 0..100)
        ) {
            let kind = |kind: u8| if kind < 200 { u32::from(kind % 5) } else { rep::ERR_UNSUP + u32::from(kind % 9) };
            let replies = kinds.iter().flat_map(|(code, data)| reply(kind(*code), data));
            let server: Vec<u8> = greeting(3).into_iter().chain(replies).chain(tail).collect();
            let _ = run(&server);
        }
    }
}

//! Mutual authentication by a shared key, between Forebay processes: method `SHARED_KEY`.
//!
//! Both sides prove possession of the key by HMACs over all negotiated values, including nonces of both sides.  Neither
//! the key nor anything from which a key of 256 random bits could be derived is transmitted.  The exact bytes are in
//! `docs/formats/msgr2.md`.

use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;

use super::auth::{AuthClient, AuthError, AuthServer, ServerStep, SessionKeys, hmac_sha256, same};
use crate::wire::codec::{PayloadReader, PayloadWriter};
use crate::wire::control::{AuthRequest, NAME_MAX, method};

/// Length of a key in bytes.
pub const KEY_LEN: usize = 32;
const NONCE_LEN: usize = 32;
const VERSION: u8 = 1;
const WHAT: &str = "a step of the shared-key method";

/// Secret key of 256 random bits.
#[derive(Clone, PartialEq, Eq)]
pub struct SharedKey([u8; KEY_LEN]);

impl SharedKey {
    /// Creates a key from its bytes.
    pub fn new(bytes: [u8; KEY_LEN]) -> Self {
        Self(bytes)
    }

    /// Parses 64 hexadecimal digits; returns `None` otherwise.
    pub fn from_hex(text: &str) -> Option<Self> {
        let text = text.trim().as_bytes();
        let mut bytes = [0; KEY_LEN];
        if text.len() != 2 * KEY_LEN {
            return None;
        }
        for (byte, digits) in bytes.iter_mut().zip(text.chunks_exact(2)) {
            let digit = |at: usize| char::from(digits[at]).to_digit(16);
            *byte = (digit(0)? << 4 | digit(1)?) as u8;
        }
        Some(Self(bytes))
    }

    /// Generates a key; `random` must return unpredictable numbers.
    pub fn generate(mut random: impl FnMut() -> u64) -> Self {
        let mut bytes = [0; KEY_LEN];
        bytes.chunks_exact_mut(8).for_each(|chunk| chunk.copy_from_slice(&random().to_le_bytes()));
        Self(bytes)
    }
}

impl fmt::Debug for SharedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedKey(..)")
    }
}

/// Keys of the peers that may connect, by name.
#[derive(Debug, Clone, Default)]
pub struct Keyring {
    keys: BTreeMap<String, SharedKey>,
    /// Default key for names without one of their own.
    shared: Option<SharedKey>,
}

impl Keyring {
    /// Creates an empty keyring, which admits no peer.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a key, replacing any previous key of that name.
    pub fn with(mut self, name: impl Into<String>, key: SharedKey) -> Self {
        self.keys.insert(name.into(), key);
        self
    }

    /// Sets a default key for names without one of their own.  Its holder may use any name.
    pub fn with_shared(mut self, key: SharedKey) -> Self {
        self.shared = Some(key);
        self
    }

    fn get(&self, name: &str) -> Option<&SharedKey> {
        self.keys.get(name).or(self.shared.as_ref())
    }
}

/// Secret that both sides derive from the key and all negotiated values.
struct Derived([u8; 32]);

impl Derived {
    fn new(key: &SharedKey, modes: &[u32], mode: u32, names: [&[u8]; 2], nonces: [&[u8; NONCE_LEN]; 2]) -> Self {
        let mut context = PayloadWriter::new();
        context.blob(b"forebay shared key 1").u32(method::SHARED_KEY).list(modes).u32(mode);
        context.blob(names[0]).blob(names[1]).raw(nonces[0]).raw(nonces[1]);
        Self(hmac_sha256(&key.0, &[&context.finish()]))
    }

    fn label(&self, label: &[u8]) -> [u8; 32] {
        hmac_sha256(&self.0, &[label])
    }

    fn keys(&self) -> SessionKeys {
        let connection = [self.label(b"connection secret, first half"), self.label(b"connection secret, second half")];
        SessionKeys { session: self.label(b"session key").to_vec(), connection: connection.concat(), global_id: 0 }
    }

    fn client_proof(&self) -> [u8; 32] {
        self.label(b"client proof")
    }

    fn server_proof(&self) -> [u8; 32] {
        self.label(b"server proof")
    }
}

fn nonce(random: &mut dyn FnMut() -> u64) -> [u8; NONCE_LEN] {
    let mut nonce = [0; NONCE_LEN];
    nonce.chunks_exact_mut(8).for_each(|chunk| chunk.copy_from_slice(&random().to_le_bytes()));
    nonce
}

fn versioned<'a>(payload: &'a [u8]) -> Result<PayloadReader<'a>, AuthError> {
    let mut reader = PayloadReader::new(payload, WHAT);
    if reader.u8()? != VERSION {
        return Err(reader.malformed().into());
    }
    Ok(reader)
}

fn name(reader: &mut PayloadReader<'_>) -> Result<String, AuthError> {
    let bytes = reader.blob()?;
    if bytes.len() > NAME_MAX {
        return Err(reader.malformed().into());
    }
    String::from_utf8(bytes.to_vec()).map_err(|_| reader.malformed().into())
}

/// Client side, for one connection.
#[derive(Debug)]
pub struct SharedKeyClient {
    name: String,
    key: SharedKey,
    modes: Vec<u32>,
    nonce: [u8; NONCE_LEN],
    state: ClientState,
}

enum ClientState {
    Asked,
    Proved(Derived, u32),
    Over,
}

impl fmt::Debug for ClientState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Asked => "Asked",
            Self::Proved(..) => "Proved",
            Self::Over => "Over",
        })
    }
}

impl SharedKeyClient {
    /// Creates the client `name` with its `key`.
    pub fn new(name: impl Into<String>, key: SharedKey) -> Self {
        Self { name: name.into(), key, modes: Vec::new(), nonce: [0; NONCE_LEN], state: ClientState::Over }
    }
}

impl AuthClient for SharedKeyClient {
    fn method(&self) -> u32 {
        method::SHARED_KEY
    }

    fn begin(&mut self, modes: &[u32], random: &mut dyn FnMut() -> u64) -> Vec<u8> {
        self.modes = modes.to_vec();
        self.nonce = nonce(random);
        self.state = ClientState::Asked;
        let mut out = PayloadWriter::new();
        out.u8(VERSION).blob(self.name.as_bytes()).raw(&self.nonce);
        out.finish()
    }

    fn more(&mut self, payload: &[u8], _random: &mut dyn FnMut() -> u64) -> Result<Vec<u8>, AuthError> {
        if !matches!(self.state, ClientState::Asked) {
            return Err(AuthError::OutOfTurn);
        }
        let mut reader = versioned(payload)?;
        let server_nonce = reader.array()?;
        let server = name(&mut reader)?;
        let mode = reader.u32()?;
        let names = [self.name.as_bytes(), server.as_bytes()];
        let derived = Derived::new(&self.key, &self.modes, mode, names, [&self.nonce, &server_nonce]);
        let mut out = PayloadWriter::new();
        out.u8(VERSION).raw(&derived.client_proof());
        self.state = ClientState::Proved(derived, mode);
        Ok(out.finish())
    }

    fn done(&mut self, mode: u32, payload: &[u8]) -> Result<SessionKeys, AuthError> {
        let ClientState::Proved(derived, agreed) = std::mem::replace(&mut self.state, ClientState::Over) else {
            return Err(AuthError::OutOfTurn);
        };
        let proof = versioned(payload)?.array::<32>()?;
        if agreed != mode || !same(&proof, &derived.server_proof()) {
            return Err(AuthError::Proof("the server".into()));
        }
        Ok(derived.keys())
    }
}

/// Server side, for one connection.
pub struct SharedKeyServer {
    name: String,
    keyring: Rc<Keyring>,
    waiting: Option<(String, Option<Derived>)>,
}

impl SharedKeyServer {
    /// Creates the server `name`, which admits the peers of `keyring`.
    pub fn new(name: impl Into<String>, keyring: Rc<Keyring>) -> Self {
        Self { name: name.into(), keyring, waiting: None }
    }
}

impl AuthServer for SharedKeyServer {
    fn methods(&self) -> Vec<u32> {
        vec![method::SHARED_KEY]
    }

    fn begin(
        &mut self,
        request: &AuthRequest,
        mode: u32,
        random: &mut dyn FnMut() -> u64,
    ) -> Result<ServerStep, AuthError> {
        if request.method != method::SHARED_KEY {
            return Err(AuthError::Method(request.method));
        }
        let mut reader = versioned(&request.payload)?;
        let client = name(&mut reader)?;
        let client_nonce = reader.array()?;
        let server_nonce = nonce(random);
        let names = [client.as_bytes(), self.name.as_bytes()];
        // An unknown name proceeds to the proof as well, so that names cannot be probed.
        let key = self.keyring.get(&client);
        let derived = key.map(|key| Derived::new(key, &request.modes, mode, names, [&client_nonce, &server_nonce]));
        self.waiting = Some((client, derived));
        let mut out = PayloadWriter::new();
        out.u8(VERSION).raw(&server_nonce).blob(self.name.as_bytes()).u32(mode);
        Ok(ServerStep::More(out.finish()))
    }

    fn more(&mut self, payload: &[u8]) -> Result<ServerStep, AuthError> {
        let (name, derived) = self.waiting.take().ok_or(AuthError::OutOfTurn)?;
        let proof = versioned(payload)?.array::<32>()?;
        let Some(derived) = derived.filter(|derived| same(&proof, &derived.client_proof())) else {
            return Err(AuthError::Proof(name));
        };
        let mut out = PayloadWriter::new();
        out.u8(VERSION).raw(&derived.server_proof());
        Ok(ServerStep::Done { payload: out.finish(), keys: derived.keys(), name })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::control::mode;

    fn key(byte: u8) -> SharedKey {
        SharedKey::new([byte; KEY_LEN])
    }

    fn keyring() -> Rc<Keyring> {
        Rc::new(Keyring::new().with("a", key(1)).with("b", key(2)))
    }

    fn chance() -> impl FnMut() -> u64 {
        let mut state = 9u64;
        move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state
        }
    }

    /// Runs the whole exchange, applying `tamper` to each payload.
    fn exchange(
        client: &mut SharedKeyClient,
        modes: &[u32],
        mut tamper: impl FnMut(usize, &mut Vec<u8>),
    ) -> Result<(SessionKeys, SessionKeys, String), AuthError> {
        let mut server = SharedKeyServer::new("s", keyring());
        let mut random = chance();
        let mut payload = client.begin(modes, &mut random);
        tamper(0, &mut payload);
        let request = AuthRequest { method: method::SHARED_KEY, modes: modes.to_vec(), payload };
        let ServerStep::More(mut payload) = server.begin(&request, mode::SECURE, &mut random)? else {
            panic!("there is more to come")
        };
        tamper(1, &mut payload);
        let mut payload = client.more(&payload, &mut random)?;
        tamper(2, &mut payload);
        let ServerStep::Done { mut payload, keys, name } = server.more(&payload)? else { panic!("that was all") };
        tamper(3, &mut payload);
        Ok((client.done(mode::SECURE, &payload)?, keys, name))
    }

    #[test]
    fn who_shares_a_key_agrees_on_keys() {
        let (ours, theirs, name) =
            exchange(&mut SharedKeyClient::new("a", key(1)), &[2, 1], |_, _| {}).expect("agreed");
        assert_eq!((&ours, name.as_str()), (&theirs, "a"));
        assert_eq!((ours.session.len(), ours.connection.len()), (32, 64));
        let (other, _, _) = exchange(&mut SharedKeyClient::new("b", key(2)), &[2, 1], |_, _| {}).expect("agreed");
        assert_ne!(ours.connection, other.connection);
    }

    #[test]
    fn strangers_and_impostors_are_refused_alike() {
        for mut client in
            [SharedKeyClient::new("a", key(2)), SharedKeyClient::new("c", key(1)), SharedKeyClient::new("b", key(1))]
        {
            let refused = exchange(&mut client, &[2], |_, _| {}).expect_err("no right key");
            assert_eq!(refused, AuthError::Proof(client.name.clone()));
        }
    }

    #[test]
    fn every_changed_byte_is_noticed() {
        for step in 0..4 {
            let mut len = 0;
            exchange(&mut SharedKeyClient::new("a", key(1)), &[2, 1], |at, payload| {
                if at == step {
                    len = payload.len();
                }
            })
            .expect("agreed");
            for at in 0..len {
                let changed = exchange(&mut SharedKeyClient::new("a", key(1)), &[2, 1], |now, payload| {
                    if now == step {
                        payload[at] ^= 1;
                    }
                });
                assert!(changed.is_err(), "byte {at} of step {step}");
            }
        }
    }

    #[test]
    fn the_key_does_not_travel() {
        let secret = key(0xA7);
        let mut seen = Vec::new();
        let _ = exchange(&mut SharedKeyClient::new("a", secret), &[2], |_, payload| seen.extend_from_slice(payload));
        assert!(!seen.windows(4).any(|part| part == [0xA7; 4]));
    }

    #[test]
    fn steps_out_of_turn_are_refused() {
        let mut client = SharedKeyClient::new("a", key(1));
        assert_eq!(client.more(&[1], &mut || 0), Err(AuthError::OutOfTurn));
        assert_eq!(client.done(2, &[1]), Err(AuthError::OutOfTurn));
        assert_eq!(SharedKeyServer::new("s", keyring()).more(&[1; 33]), Err(AuthError::OutOfTurn));
    }

    #[test]
    fn keys_are_written_in_hexadecimal() {
        assert_eq!(SharedKey::from_hex(&"0102".repeat(16)).map(|key| key.0[..2].to_vec()), Some(vec![1, 2]));
        for text in ["", "01", &"0g".repeat(32), &"01".repeat(33)] {
            assert_eq!(SharedKey::from_hex(text), None);
        }
    }
}

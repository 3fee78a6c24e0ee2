//! The object classes `lock` and `rbd`, as far as images call them.
//!
//! Written from Ceph's formats, independently of the calling crate, so that each can reveal the other's mistakes.

use std::rc::Rc;

use forebay_accel::crc32c;
use forebay_block::{Buf, Error, ErrorKind, Extent, Method, Result};

use crate::content::{ObjectContent, PageCounter};
use crate::object::Classes;

/// Block size in bytes of the object map's checksums.
const BLOCK: usize = 4096;
const NO_SNAP: u64 = u64::MAX - 1;

/// Client that calls a method.
pub(super) struct Caller {
    pub(super) number: u64,
    pub(super) address: String,
}

/// Lock holder: type and number of the entity, cookie, address.
type Locker = (u8, u64, String, String);

/// Lock as kept by the model.
#[derive(Default)]
struct Lock {
    kind: u8,
    tag: String,
    lockers: Vec<Locker>,
}

struct Input<'a>(&'a [u8]);

fn bad() -> Error {
    ErrorKind::Invalid.into()
}

impl<'a> Input<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or_else(bad)?;
        self.0 = rest;
        Ok(taken)
    }

    fn u8(&mut self) -> Result<u8> {
        Ok(self.take(1)?[0])
    }

    fn u32(&mut self) -> Result<u32> {
        self.take(4).map(|bytes| u32::from_le_bytes(bytes.try_into().expect("4 bytes")))
    }

    fn u64(&mut self) -> Result<u64> {
        self.take(8).map(|bytes| u64::from_le_bytes(bytes.try_into().expect("8 bytes")))
    }

    fn string(&mut self) -> Result<String> {
        let len = self.u32()? as usize;
        String::from_utf8(self.take(len)?.to_vec()).map_err(|_| bad())
    }

    /// Reads a versioned structure, and returns its content.
    fn structure(&mut self) -> Result<Input<'a>> {
        self.take(2)?;
        let len = self.u32()? as usize;
        self.take(len).map(Input)
    }
}

fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u32).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put_structure(out: &mut Vec<u8>, body: &[u8]) {
    out.extend([1, 1]);
    out.extend((body.len() as u32).to_le_bytes());
    out.extend(body);
}

fn read_lock(head: Option<&ObjectContent>, name: &str) -> Lock {
    let stored = head.and_then(|head| head.attributes.get(&format!("lock.{name}")));
    let decode = |bytes: &Vec<u8>| -> Result<Lock> {
        let mut input = Input(bytes);
        let (kind, tag, count) = (input.u8()?, input.string()?, input.u32()?);
        let lockers = (0..count).map(|_| Ok((input.u8()?, input.u64()?, input.string()?, input.string()?)));
        Ok(Lock { kind, tag, lockers: lockers.collect::<Result<_>>()? })
    };
    stored.map(|bytes| decode(bytes).expect("the model wrote it")).unwrap_or_default()
}

fn write_lock(head: &mut ObjectContent, name: &str, lock: &Lock) {
    let mut out = vec![lock.kind];
    put_string(&mut out, &lock.tag);
    out.extend((lock.lockers.len() as u32).to_le_bytes());
    for (kind, number, cookie, address) in &lock.lockers {
        out.push(*kind);
        out.extend(number.to_le_bytes());
        put_string(&mut out, cookie);
        put_string(&mut out, address);
    }
    head.attributes.insert(format!("lock.{name}"), out);
}

fn existing(head: &mut Option<ObjectContent>) -> Result<&mut ObjectContent> {
    head.as_mut().ok_or_else(|| ErrorKind::NotFound.into())
}

fn remove_locker(head: &mut Option<ObjectContent>, name: &str, kind: u8, number: u64, cookie: &str) -> Result<()> {
    let head = existing(head)?;
    let mut lock = read_lock(Some(head), name);
    let before = lock.lockers.len();
    lock.lockers.retain(|locker| (locker.0, locker.1, &locker.2[..]) != (kind, number, cookie));
    if lock.lockers.len() == before {
        return Err(ErrorKind::NotFound.into());
    }
    write_lock(head, name, &lock);
    Ok(())
}

/// Returns the index of this client's entry in a lock; fails with `Busy` if it does not hold the lock.
fn own_entry(lock: &Lock, kind: u8, tag: &str, number: u64, cookie: &str) -> Result<usize> {
    let own = lock.lockers.iter().position(|locker| (locker.0, locker.1, &locker.2[..]) == (8, number, cookie));
    own.filter(|_| lock.kind == kind && lock.tag == tag).ok_or_else(|| ErrorKind::Busy.into())
}

impl Classes for Caller {
    fn call(
        &self,
        head: &mut Option<ObjectContent>,
        method: Method,
        input: &[u8],
        space: &Rc<PageCounter>,
    ) -> Result<()> {
        match (method.class, method.name) {
            ("lock", name) => self.call_lock(head, name, Input(input).structure()?),
            ("rbd", name) => call_rbd(head, name, Input(input), space),
            _ => Err(Error::new(ErrorKind::Unsupported, format!("{method:?}"))),
        }
    }
}

impl Caller {
    fn call_lock(&self, head: &mut Option<ObjectContent>, method: &str, mut input: Input<'_>) -> Result<()> {
        let name = input.string()?;
        match method {
            "lock" => {
                let (kind, cookie, tag) = (input.u8()?, input.string()?, input.string()?);
                let head = head.get_or_insert_default();
                let mut lock = read_lock(Some(head), &name);
                if !lock.lockers.is_empty() && lock.tag != tag {
                    return Err(ErrorKind::Busy.into());
                }
                if lock.lockers.iter().any(|locker| (locker.1, &locker.2) == (self.number, &cookie)) {
                    return Err(ErrorKind::Exists.into());
                }
                if !lock.lockers.is_empty() && (kind == 1 || lock.kind != kind) {
                    return Err(ErrorKind::Busy.into());
                }
                (lock.kind, lock.tag) = (kind, tag);
                lock.lockers.push((8, self.number, cookie, self.address.clone()));
                write_lock(head, &name, &lock);
                Ok(())
            }
            "unlock" => remove_locker(head, &name, 8, self.number, &input.string()?),
            "break_lock" => {
                let (kind, number) = (input.u8()?, input.u64()?);
                remove_locker(head, &name, kind, number, &input.string()?)
            }
            "assert_locked" | "set_cookie" => {
                let (kind, cookie, tag) = (input.u8()?, input.string()?, input.string()?);
                let head = existing(head)?;
                let mut lock = read_lock(Some(head), &name);
                let own = own_entry(&lock, kind, &tag, self.number, &cookie)?;
                if method == "set_cookie" {
                    lock.lockers[own].2 = input.string()?;
                    write_lock(head, &name, &lock);
                }
                Ok(())
            }
            _ => Err(ErrorKind::Unsupported.into()),
        }
    }
}

/// Executes a read-only method.
pub(super) fn exec(head: &ObjectContent, method: Method, input: &[u8]) -> Result<Vec<u8>> {
    if (method.class, method.name) != ("lock", "get_info") {
        return Err(Error::new(ErrorKind::Unsupported, format!("{method:?}")));
    }
    let name = Input(input).structure()?.string()?;
    let lock = read_lock(Some(head), &name);
    let mut body = (lock.lockers.len() as u32).to_le_bytes().to_vec();
    for (kind, number, cookie, address) in &lock.lockers {
        let mut id = vec![*kind];
        id.extend(number.to_le_bytes());
        put_string(&mut id, cookie);
        put_structure(&mut body, &id);
        let mut info = vec![0; 8];
        put_address(&mut info, address);
        put_string(&mut info, "");
        put_structure(&mut body, &info);
    }
    body.push(lock.kind);
    put_string(&mut body, &lock.tag);
    let mut out = Vec::new();
    put_structure(&mut out, &body);
    Ok(out)
}

/// Encodes `IPv4:PORT/NONCE` as a Ceph entity address.
fn put_address(out: &mut Vec<u8>, address: &str) {
    let (socket, nonce) = address.split_once('/').expect("an address of the model");
    let socket: std::net::SocketAddrV4 = socket.parse().expect("an address of the model");
    let nonce: u32 = nonce.parse().expect("an address of the model");
    let mut body = 2u32.to_le_bytes().to_vec();
    body.extend(nonce.to_le_bytes());
    body.extend(16u32.to_le_bytes());
    body.extend(2u16.to_le_bytes());
    body.extend(socket.port().to_be_bytes());
    body.extend(socket.ip().octets());
    body.extend([0; 8]);
    out.push(1);
    put_structure(out, &body);
}

fn call_rbd(
    head: &mut Option<ObjectContent>,
    method: &str,
    mut input: Input<'_>,
    space: &Rc<PageCounter>,
) -> Result<()> {
    match method {
        "object_map_update" => {
            let (start, end, to) = (input.u64()?, input.u64()?, input.u8()?);
            let from = if input.u8()? == 0 { None } else { Some(input.u8()?) };
            let head = existing(head)?;
            let mut map = read_map(head)?;
            if start >= end || end > map.len() as u64 {
                return Err(ErrorKind::Invalid.into());
            }
            for state in &mut map[start as usize..end as usize] {
                if from.is_none_or(|from| *state == from || from == 1 && *state == 3) {
                    *state = to;
                }
            }
            write_map(head, &map, space);
            Ok(())
        }
        "object_map_resize" => {
            let (count, state) = (input.u64()?, input.u8()?);
            let head = head.get_or_insert_default();
            let mut map = if head.size() == 0 { Vec::new() } else { read_map(head)? };
            if map.get(count as usize..).is_some_and(|cut| cut.iter().any(|&cut| cut != state)) {
                // The objects past a reduced size must be removed first (cls_rbd: ESTALE).
                return Err(Error::new(ErrorKind::Io, "an object map that is cut still has objects"));
            }
            map.resize(usize::try_from(count).map_err(|_| bad())?, state);
            write_map(head, &map, space);
            Ok(())
        }
        "object_map_snap_remove" => {
            let head = existing(head)?;
            let removed = decode_map(input.0)?;
            let mut map = read_map(head)?;
            for (state, removed) in map.iter_mut().zip(removed) {
                if (*state, removed) == (3, 1) {
                    *state = 1;
                }
            }
            write_map(head, &map, space);
            Ok(())
        }
        "set_flags" => {
            let (flags, mask) = (input.u64()?, input.u64()?);
            let snap = if input.0.is_empty() { NO_SNAP } else { input.u64()? };
            if snap != NO_SNAP {
                return Err(ErrorKind::Unsupported.into());
            }
            let head = existing(head)?;
            let old = head.kv.get(&b"flags"[..]).and_then(|value| value.first_chunk().copied());
            let old = old.map_or(0, u64::from_le_bytes);
            head.kv.insert(b"flags".to_vec(), (old & !mask | flags & mask).to_le_bytes().to_vec());
            Ok(())
        }
        _ => Err(ErrorKind::Unsupported.into()),
    }
}

/// Reads the states of an object map, one per byte.
fn read_map(head: &ObjectContent) -> Result<Vec<u8>> {
    decode_map(&head.read(Extent::new(0, head.size())).fill(Extent::new(0, head.size())).to_vec())
}

fn decode_map(stored: &[u8]) -> Result<Vec<u8>> {
    let mut input = Input(stored);
    let header_len = input.u32()? as usize;
    let header = input.take(header_len)?;
    let count = Input(header).structure()?.u64()? as usize;
    let bits = input.take(count.div_ceil(4))?;
    let footer_len = input.u32()? as usize;
    let mut footer = Input(input.take(footer_len)?);
    if footer.u32()? != checksum(header) {
        return Err(bad());
    }
    footer.u32()?;
    for block in bits.chunks(BLOCK) {
        if footer.u32()? != checksum(block) {
            return Err(bad());
        }
    }
    Ok((0..count).map(|object| bits[object / 4] >> (6 - object % 4 * 2) & 3).collect())
}

fn write_map(head: &mut ObjectContent, map: &[u8], space: &Rc<PageCounter>) {
    let mut header = Vec::new();
    put_structure(&mut header, &(map.len() as u64).to_le_bytes());
    let bits: Vec<u8> = map
        .chunks(4)
        .map(|four| four.iter().enumerate().fold(0, |byte, (at, state)| byte | state << (6 - at * 2)))
        .collect();
    let mut footer = checksum(&header).to_le_bytes().to_vec();
    footer.extend((bits.len().div_ceil(BLOCK) as u32).to_le_bytes());
    bits.chunks(BLOCK).for_each(|block| footer.extend(checksum(block).to_le_bytes()));
    let mut out = (header.len() as u32).to_le_bytes().to_vec();
    out.extend(header);
    out.extend(bits);
    out.extend((footer.len() as u32).to_le_bytes());
    out.extend(footer);
    head.replace(&Buf::copy_of(&out).into(), space);
}

fn checksum(bytes: &[u8]) -> u32 {
    !crc32c::extend(!0, bytes)
}

//! Writer of numbered blocks, which knows what each block may hold after a crash.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail, ensure};

use crate::nbd::Client;

/// Bytes of a block.
pub const BLOCK: usize = 4096;
const DEPTH: usize = 16;
/// Number of writes that nobody may find.
const RIVAL: u64 = u64::MAX >> 1;

/// Returns the nanoseconds since 1970, as a seed.
pub fn unix_nanoseconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64)
}

/// Content of a block: the zeroes of a write of zeroes (or of a new volume), or a numbered write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    Zeroes,
    Number(u64),
}

/// One connection's share of the volume, and what each of its blocks may hold.
pub struct Writer {
    first: u64,
    /// Allowed contents: the acknowledged one, then everything sent since, in order.
    allowed: Vec<Vec<Content>>,
    random: Random,
    number: u64,
}

/// Permission to end, given to writers by another thread.
#[derive(Default)]
pub struct Ending {
    /// Set when requests may fail: the server is about to be lost.
    pub killed: AtomicBool,
    /// Set when writers shall end in order, with all requests answered.
    pub stopped: AtomicBool,
}

enum Sent {
    Write { block: u64, content: Content },
    Flush,
}

impl Writer {
    /// Writes to these blocks of a new volume.
    pub fn new(first: u64, blocks: u64, seed: u64) -> Self {
        let allowed = vec![vec![Content::Zeroes]; blocks as usize];
        Self { first, allowed, random: Random(seed | 1), number: 0 }
    }

    /// Writes with several requests in flight until the server is gone or the end is asked for; returns how many writes
    /// were answered.
    ///
    /// # Errors
    /// Fails on a request that fails before `ending` allows it.
    pub fn write_until(&mut self, socket: &Path, export: &str, ending: &Ending) -> Result<u64> {
        let mut client = Client::connect(socket, export)?;
        let mut flying: BTreeMap<u64, Sent> = BTreeMap::new();
        let mut count = 0;
        loop {
            let is_stopped = ending.stopped.load(Ordering::SeqCst);
            if is_stopped && flying.is_empty() {
                return Ok(count);
            }
            let step = if flying.len() < DEPTH && !is_stopped {
                self.send(&mut client, &mut flying)
            } else {
                self.receive(&mut client, &mut flying).map(|writes| count += writes)
            };
            match step {
                Ok(()) => {}
                Err(_) if ending.killed.load(Ordering::SeqCst) => {
                    return Ok(count + self.receive_rest(&mut client, &mut flying));
                }
                Err(error) => return Err(error.context("the daemon failed a request before it was killed")),
            }
        }
    }

    /// Receives the answers that still arrive after a failure: a write that is answered now is promised like any other.
    fn receive_rest(&mut self, client: &mut Client, flying: &mut BTreeMap<u64, Sent>) -> u64 {
        let mut count = 0;
        while !flying.is_empty() {
            let before = flying.len();
            match self.receive(client, flying) {
                Ok(writes) => count += writes,
                // A request that failed is no longer in flight; without one that is, the connection has ended.
                Err(_) if flying.len() < before => {}
                Err(_) => break,
            }
        }
        count
    }

    /// Writes each block once, and waits until all writes are answered.
    pub fn overwrite(&mut self, client: &mut Client) -> Result<()> {
        for block in 0..self.allowed.len() {
            self.number += 1;
            let content = Content::Number(self.number);
            self.allowed[block].push(content);
            let number = self.first + block as u64;
            client.write(number * BLOCK as u64, &pattern(number, self.number), false)?;
            let answer = client.answer()?;
            ensure!(answer.error == 0, "overwriting block {number} fails with error {}", answer.error);
            self.promise(block as u64, content);
        }
        Ok(())
    }

    /// Sends a write of other content to each of the first blocks, which no later [`Self::check`] may find.
    pub fn send_rivals(&self, client: &mut Client, blocks: u64) -> Result<()> {
        for number in self.first..self.first + blocks {
            client.write(number * BLOCK as u64, &pattern(number, RIVAL), false)?;
        }
        Ok(())
    }

    fn send(&mut self, client: &mut Client, flying: &mut BTreeMap<u64, Sent>) -> Result<()> {
        if self.random.next().is_multiple_of(24) {
            flying.insert(client.flush()?, Sent::Flush);
            return Ok(());
        }
        // Writes to one block that are in flight together have no order: a block in flight is left alone.
        let block = loop {
            let block = self.random.next() % self.allowed.len() as u64;
            if !flying.values().any(|sent| matches!(sent, Sent::Write { block: other, .. } if *other == block)) {
                break block;
            }
        };
        let offset = (self.first + block) * BLOCK as u64;
        let fua = self.random.next().is_multiple_of(16);
        let zeroes = !fua && self.random.next().is_multiple_of(16);
        self.number += 1;
        let content = if zeroes { Content::Zeroes } else { Content::Number(self.number) };
        // It may be on the medium from here on, whether or not it is ever answered.
        self.allowed[block as usize].push(content);
        let handle = match content {
            Content::Zeroes => client.write_zeroes(offset, BLOCK)?,
            Content::Number(number) => client.write(offset, &pattern(self.first + block, number), fua)?,
        };
        flying.insert(handle, Sent::Write { block, content });
        Ok(())
    }

    fn receive(&mut self, client: &mut Client, flying: &mut BTreeMap<u64, Sent>) -> Result<u64> {
        let answer = client.answer()?;
        let sent = flying.remove(&answer.handle).context("an answer to nothing")?;
        if answer.error != 0 {
            bail!("a request failed with error {}", answer.error);
        }
        match sent {
            Sent::Write { block, content } => {
                self.promise(block, content);
                Ok(1)
            }
            Sent::Flush => Ok(0),
        }
    }

    /// From now on nothing older than `content` may be found at `block`.
    fn promise(&mut self, block: u64, content: Content) {
        let allowed = &mut self.allowed[block as usize];
        // A promise that a later one has overtaken is not in the list any more.  Zeroes have no number: the oldest
        // ones are taken, which allows too much rather than too little.
        if let Some(at) = allowed.iter().position(|&other| other == content) {
            allowed.drain(..at);
        }
    }

    /// Reads everything back.  What is there after a restart is durable, and the only thing allowed from then on.
    pub fn check(&mut self, client: &mut Client) -> Result<()> {
        const RUN: usize = 64;
        for begin in (0..self.allowed.len()).step_by(RUN) {
            client.read((self.first + begin as u64) * BLOCK as u64, RUN * BLOCK)?;
            let answer = client.answer()?;
            ensure!(answer.error == 0, "reading fails with error {}", answer.error);
            for (index, data) in answer.data.chunks_exact(BLOCK).enumerate() {
                let block = begin + index;
                let found = content(self.first + block as u64, data).with_context(|| {
                    format!("block {} holds data that was never written", self.first + block as u64)
                })?;
                ensure!(
                    self.allowed[block].contains(&found),
                    "block {} holds {found:?}; promised or possible were {:?}",
                    self.first + block as u64,
                    self.allowed[block]
                );
                self.allowed[block] = vec![found];
            }
        }
        Ok(())
    }
}

/// The content of a numbered write: the block, the number, and what follows from them.
fn pattern(block: u64, number: u64) -> Vec<u8> {
    let mut random = Random(block.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number.rotate_left(32) | 1);
    let mut data = Vec::with_capacity(BLOCK);
    data.extend(block.to_le_bytes());
    data.extend(number.to_le_bytes());
    while data.len() < BLOCK {
        data.extend(random.next().to_le_bytes());
    }
    data
}

fn content(block: u64, data: &[u8]) -> Option<Content> {
    let number = u64::from_le_bytes(data[8..16].try_into().ok()?);
    if data.iter().all(|&byte| byte == 0) {
        return Some(Content::Zeroes);
    }
    (pattern(block, number) == data).then_some(Content::Number(number))
}

/// Marsaglia's xorshift: enough to choose blocks by.
pub struct Random(pub u64);

impl Random {
    /// Returns the next number.
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 3
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_known_again_and_torn_ones_are_not() {
        let mut data = pattern(7, 42);
        assert_eq!(content(7, &data), Some(Content::Number(42)));
        assert_eq!(content(8, &data), None, "a block at another place is not ours");
        data[2048] ^= 1;
        assert_eq!(content(7, &data), None, "a damaged block is not ours");
        data[2048..].fill(0);
        assert_eq!(content(7, &data), None, "a torn block is not ours");
        assert_eq!(content(7, &[0; BLOCK]), Some(Content::Zeroes));
    }

    #[test]
    fn a_promise_forbids_what_is_older() {
        let mut writer = Writer::new(0, 1, 1);
        writer.allowed[0].extend([Content::Number(1), Content::Number(2), Content::Number(3)]);
        writer.promise(0, Content::Number(2));
        assert_eq!(writer.allowed[0], [Content::Number(2), Content::Number(3)]);
        writer.promise(0, Content::Number(1));
        assert_eq!(writer.allowed[0], [Content::Number(2), Content::Number(3)], "an overtaken promise changes nothing");
    }
}

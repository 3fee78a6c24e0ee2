//! Memory shared with another process: two byte rings, one in each direction.
//!
//! One side creates the memory, sealed so that neither side can shrink it, and passes its descriptor to the other over
//! a Unix socket.  Each ring has one producer and one consumer.  The peer is not trusted: its ring positions are
//! checked, and bytes are copied out before they are parsed.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Magic number and version.
const MAGIC: u64 = u64::from_le_bytes(*b"FBshm\0\0\x01");
/// Bytes before the first ring.
const HEAD: usize = 4096;
/// Bytes of a ring: a power of two.
pub const RING_LEN: usize = 1 << 20;
const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// Control block of a ring; every field on a cache line of its own.
#[repr(C, align(64))]
struct Control {
    /// Total bytes written.
    written: AtomicU64,
    _pad0: [u64; 7],
    /// Total bytes read.
    read: AtomicU64,
    _pad1: [u64; 7],
    /// Nonzero while the consumer sleeps and must be woken.
    consumer_sleeps: AtomicU32,
    _pad2: [u32; 15],
    /// Nonzero while the producer sleeps and must be woken.
    producer_sleeps: AtomicU32,
    _pad3: [u32; 15],
}

#[repr(C)]
struct Header {
    magic: AtomicU64,
    _pad: [u64; 7],
    rings: [Control; 2],
}

const _: () = assert!(size_of::<Header>() <= HEAD);

struct Mapping {
    base: NonNull<u8>,
}

// SAFETY: a Mapping is only a piece of memory; Producer and Consumer decide who accesses which part of it.
unsafe impl Send for Mapping {}
// SAFETY: as above; the parts that both use are atomic.
unsafe impl Sync for Mapping {}

impl Mapping {
    const LEN: usize = HEAD + 2 * RING_LEN;

    fn new(fd: &OwnedFd) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice; nothing else refers to it.
        let base = unsafe {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), Self::LEN, protection, libc::MAP_SHARED, fd.as_raw_fd(), 0)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { base: NonNull::new(base.cast()).expect("a mapping is not at address zero") })
    }

    fn header(&self) -> &Header {
        // SAFETY: the mapping is longer than a Header, page-aligned, and a Header is valid for any bytes; both
        // processes access it by atomic operations only.
        unsafe { self.base.cast().as_ref() }
    }

    fn ring(&self, ring: usize) -> *mut u8 {
        // SAFETY: both rings lie within the mapping.
        unsafe { self.base.as_ptr().add(HEAD + ring * RING_LEN) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length, and no Producer or Consumer refers to it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), Self::LEN) };
    }
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn corrupt() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the peer has written nonsense into shared memory")
}

/// Creates memory for two rings; returns this side's ends, and the descriptor for the peer.
///
/// # Errors
/// When the system has no memory or descriptors left.
pub fn create() -> io::Result<(Producer, Consumer, OwnedFd)> {
    // SAFETY: the name is a C string.
    let fd = unsafe { libc::memfd_create(c"forebay".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    // SAFETY: just opened, with no other owner.
    let fd = unsafe { OwnedFd::from_raw_fd(check(fd)?) };
    // SAFETY: no pointers.
    check(unsafe { libc::ftruncate(fd.as_raw_fd(), Mapping::LEN as libc::off_t) })?;
    // SAFETY: no pointers.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, SEALS) })?;
    let mapping = Arc::new(Mapping::new(&fd)?);
    mapping.header().magic.store(MAGIC, Ordering::Release);
    let (producer, consumer) = ends(&mapping, 0);
    Ok((producer, consumer, fd))
}

/// Maps the memory that the peer has created; returns this side's ends.
///
/// # Errors
/// `InvalidData` when it is not such memory, or could be shrunk while in use.
pub fn adopt(fd: &OwnedFd) -> io::Result<(Producer, Consumer)> {
    // SAFETY: no pointers.
    let seals = check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) })?;
    // SAFETY: fstat fills the structure, for which any bytes are valid.
    let stat = unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        check(libc::fstat(fd.as_raw_fd(), &mut stat))?;
        stat
    };
    if seals & SEALS != SEALS || stat.st_size != Mapping::LEN as libc::off_t {
        return Err(corrupt());
    }
    let mapping = Arc::new(Mapping::new(fd)?);
    if mapping.header().magic.load(Ordering::Acquire) != MAGIC {
        return Err(corrupt());
    }
    let (producer, consumer) = ends(&mapping, 1);
    Ok((producer, consumer))
}

fn ends(mapping: &Arc<Mapping>, out: usize) -> (Producer, Consumer) {
    let producer = Producer { mapping: mapping.clone(), ring: out, written: 0, read: 0 };
    (producer, Consumer { mapping: mapping.clone(), ring: 1 - out, read: 0 })
}

/// Splits the ring range of `len` bytes at position `at` (total bytes) into one or two pieces: start and length.
fn pieces(at: u64, len: usize) -> [(usize, usize); 2] {
    let start = (at as usize) & (RING_LEN - 1);
    let first = len.min(RING_LEN - start);
    [(start, first), (0, len - first)]
}

/// Writing end of a ring.
pub struct Producer {
    mapping: Arc<Mapping>,
    ring: usize,
    written: u64,
    /// Read position of the consumer when last loaded; cached, because the consumer keeps writing to that cache line.
    read: u64,
}

impl Producer {
    fn control(&self) -> &Control {
        &self.mapping.header().rings[self.ring]
    }

    /// Returns the bytes that can be written now.
    ///
    /// # Errors
    /// `InvalidData` when the peer's read position is invalid.
    pub fn room(&self) -> io::Result<usize> {
        let used = self.written.wrapping_sub(self.control().read.load(Ordering::Acquire));
        if used > RING_LEN as u64 { Err(corrupt()) } else { Ok(RING_LEN - used as usize) }
    }

    /// Writes as much of `bytes` as fits, invisible to the consumer until [`publish`](Self::publish); returns the bytes
    /// written.
    ///
    /// # Errors
    /// As [`room`](Self::room).
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut room = RING_LEN - self.written.wrapping_sub(self.read) as usize;
        if room < bytes.len() {
            room = self.room()?;
            self.read = self.written.wrapping_sub((RING_LEN - room) as u64);
        }
        let len = bytes.len().min(room);
        let mut from = bytes.as_ptr();
        for (start, len) in pieces(self.written, len) {
            // SAFETY: the piece lies within the ring, and within the part that the consumer has released (it reads only
            // published bytes); `bytes` are private memory of at least that length.
            unsafe {
                std::ptr::copy_nonoverlapping(from, self.mapping.ring(self.ring).add(start), len);
                from = from.add(len);
            }
        }
        self.written = self.written.wrapping_add(len as u64);
        Ok(len)
    }

    /// Publishes the written bytes; returns true when the consumer sleeps and must be woken.
    pub fn publish(&mut self) -> bool {
        let control = self.control();
        control.written.store(self.written, Ordering::Release);
        // Either this load sees that the consumer sleeps, or the consumer, which checks again after setting the flag,
        // sees the bytes.
        fence(Ordering::SeqCst);
        control.consumer_sleeps.load(Ordering::Relaxed) != 0 && control.consumer_sleeps.swap(0, Ordering::SeqCst) != 0
    }

    /// Sets the producer's sleep flag; returns false when there is space now.
    ///
    /// # Errors
    /// As [`room`](Self::room).
    pub fn sleep(&mut self) -> io::Result<bool> {
        self.control().producer_sleeps.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        Ok(self.room()? == 0)
    }
}

/// Reading end of a ring.
pub struct Consumer {
    mapping: Arc<Mapping>,
    ring: usize,
    read: u64,
}

impl Consumer {
    fn control(&self) -> &Control {
        &self.mapping.header().rings[self.ring]
    }

    /// Returns the bytes that can be read now.
    ///
    /// # Errors
    /// `InvalidData` when the peer's write position is invalid.
    pub fn available(&self) -> io::Result<usize> {
        let unread = self.control().written.load(Ordering::Acquire).wrapping_sub(self.read);
        if unread > RING_LEN as u64 { Err(corrupt()) } else { Ok(unread as usize) }
    }

    /// Copies out as many bytes as are available and fit; returns their number, and whether the producer sleeps and
    /// must be woken.
    ///
    /// # Errors
    /// As [`available`](Self::available).
    pub fn read(&mut self, out: &mut [u8]) -> io::Result<(usize, bool)> {
        let len = out.len().min(self.available()?);
        if len == 0 {
            // Without progress, leave the producer's cache lines alone: no space was freed that it waits for.
            return Ok((0, false));
        }
        let mut to = out.as_mut_ptr();
        for (start, len) in pieces(self.read, len) {
            // SAFETY: the piece lies within the ring, and a correct producer does not write to it before it is released
            // below.  An incorrect one makes these bytes arbitrary, as all untrusted input is; `out` is private memory
            // of at least that length.
            unsafe {
                std::ptr::copy_nonoverlapping(self.mapping.ring(self.ring).add(start), to, len);
                to = to.add(len);
            }
        }
        self.read = self.read.wrapping_add(len as u64);
        let control = self.control();
        control.read.store(self.read, Ordering::Release);
        fence(Ordering::SeqCst);
        let sleeps = control.producer_sleeps.load(Ordering::Relaxed) != 0
            && control.producer_sleeps.swap(0, Ordering::SeqCst) != 0;
        Ok((len, sleeps))
    }

    /// Sets the consumer's sleep flag; returns false when there are bytes now.
    ///
    /// # Errors
    /// As [`available`](Self::available).
    pub fn sleep(&mut self) -> io::Result<bool> {
        self.control().consumer_sleeps.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        Ok(self.available()? == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(at: u64) -> u8 {
        (at.wrapping_mul(31) ^ at >> 8) as u8
    }

    #[test]
    fn bytes_go_around_both_rings_in_order() {
        let (mut out, mut back, fd) = create().expect("memory");
        let (mut back_out, mut got) = adopt(&fd).expect("the same memory");
        let total = 5 * RING_LEN as u64 + 12_345;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut sent = 0;
                while sent < total {
                    let len = (1 + sent % 70_000).min(total - sent);
                    let bytes: Vec<u8> = (sent..sent + len).map(pattern).collect();
                    let written = out.write(&bytes).expect("a peer that keeps to the rules");
                    out.publish();
                    sent += written as u64;
                }
            });
            let mut received = 0;
            let mut buf = vec![0; 50_000];
            while received < total {
                let (len, _) = got.read(&mut buf).expect("a peer that keeps to the rules");
                assert!((0..len).all(|at| buf[at] == pattern(received + at as u64)));
                received += len as u64;
            }
        });
        back_out.write(b"back").expect("room");
        assert_eq!(back.available().expect("nothing is wrong"), 0, "it was not published");
        back_out.publish();
        let mut four = [0; 9];
        assert_eq!(back.read(&mut four).expect("nothing is wrong"), (4, false));
        assert_eq!(&four[..4], b"back");
    }

    #[test]
    fn who_sleeps_is_to_be_woken_once() {
        let (mut out, _, fd) = create().expect("memory");
        let (_, mut got) = adopt(&fd).expect("the same memory");
        assert!(got.sleep().expect("nothing is wrong"), "there is nothing");
        out.write(b"x").expect("room");
        assert!(out.publish());
        assert!(!out.publish());
        assert!(!got.sleep().expect("nothing is wrong"), "there is something");
        let full = vec![0; RING_LEN];
        assert_eq!(out.write(&full).expect("room for most"), RING_LEN - 1);
        assert!(out.sleep().expect("nothing is wrong"), "there is no room");
        assert_eq!(got.read(&mut [0; 10]).expect("nothing is wrong"), (1, true), "only what was published");
        assert!(!out.sleep().expect("nothing is wrong"), "there is room");
    }

    #[test]
    fn nonsense_in_the_heads_is_noticed() {
        let (out, _, fd) = create().expect("memory");
        let (_, got) = adopt(&fd).expect("the same memory");
        out.control().written.store(RING_LEN as u64 + 1, Ordering::SeqCst);
        assert_eq!(got.available().expect_err("more than fits").kind(), io::ErrorKind::InvalidData);
        out.control().read.store(1, Ordering::SeqCst);
        assert_eq!(out.room().expect_err("never written").kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn memory_that_could_shrink_is_refused() {
        // SAFETY: the name is a C string.
        let fd = unsafe { libc::memfd_create(c"x".as_ptr(), libc::MFD_ALLOW_SEALING) };
        // SAFETY: just opened.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: no pointers.
        assert_eq!(unsafe { libc::ftruncate(fd.as_raw_fd(), Mapping::LEN as libc::off_t) }, 0);
        assert!(adopt(&fd).is_err());
        let other = std::fs::File::open("/proc/self/status").expect("a file");
        assert!(adopt(&other.into()).is_err());
    }
}

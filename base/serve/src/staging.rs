use forebay_reactor::{Buf, BufMut, BufPool};

/// Bytes of staging of a connection with little traffic.  Holds many requests, and the start of a large write.
pub const SMALL: usize = 4 * 1024;
/// Bytes of staging of a busy connection: many requests and short writes per receive.
pub const LARGE: usize = 256 * 1024;
/// Maximum large staging buffers per core.  When all are in use, connections use small ones.
const LARGE_MAX: usize = 128;
/// Number of large staging buffers in use above which short data is copied out, instead of keeping its whole buffer in
/// memory until the device has completed the request.
const CROWDED: usize = 64;
/// Consecutive receives with few bytes after which staging becomes small again.
const QUIET_RECEIVES: u32 = 32;

/// Receive request: a buffer, and how much of it to fill.
#[derive(Debug)]
pub struct ReceiveRequest {
    /// Buffer whose spare space is received into.
    pub buf: BufMut,
    /// True to fill all of the space, false to receive what is available.
    pub all: bool,
}

/// Pools of staging buffers, shared by the connections of a core.
#[derive(Debug)]
pub struct StagingPools {
    small: BufPool,
    large: BufPool,
}

impl StagingPools {
    /// Creates empty pools that keep up to `keep_small` free small buffers.
    pub fn new(keep_small: usize) -> Self {
        Self { small: BufPool::new(SMALL, keep_small), large: BufPool::new(LARGE, LARGE_MAX) }
    }

    /// Returns an empty buffer of [`SMALL`] bytes.
    pub fn small(&self) -> BufMut {
        self.small.get()
    }

    /// Returns an empty buffer for `len` bytes, apart from other staged data.
    pub fn apart(&self, len: usize) -> BufMut {
        if len > SMALL { BufMut::with_capacity(len) } else { self.small.get() }
    }
}

/// Received bytes of a connection that are not parsed yet.
///
/// Its buffer is small while there is little traffic and large while there is much, so that an idle connection costs a
/// page, and a busy one few system calls.
#[derive(Debug)]
pub struct ReceiveStaging {
    /// `None` while a receive into it is in flight.
    buf: Option<BufMut>,
    /// True if the next buffer is to be a large one.
    large: bool,
    /// Consecutive receives with few bytes.
    quiet: u32,
}

impl ReceiveStaging {
    /// Creates staging with the content of `buf`.
    pub fn new(buf: BufMut) -> Self {
        Self { buf: Some(buf), large: false, quiet: 0 }
    }

    /// Returns the received bytes; `None` while a receive is in flight.
    pub fn staged(&mut self) -> Option<&mut BufMut> {
        self.buf.as_mut()
    }

    /// Returns whether no unparsed bytes are here, or a receive is in flight.
    pub fn is_empty(&self) -> bool {
        self.buf.as_ref().is_none_or(|buf| buf.is_empty())
    }

    /// Announces long data that is received into a buffer of its own.  The bytes after it are received into a small
    /// buffer, so that the next long data can be received directly to its destination too.
    pub fn expect_long(&mut self) {
        self.large = false;
    }

    /// Splits off the first `len` bytes.  Copies them where large buffers are scarce.
    ///
    /// # Panics
    /// When there are fewer, or a receive is in flight.
    pub fn cut(&mut self, len: usize, pools: &StagingPools) -> Buf {
        let buf = self.buf.as_mut().expect("staging that is here");
        if pools.large.outstanding() > CROWDED && buf.capacity() > SMALL {
            let mut apart = pools.apart(len);
            apart.extend_from_slice(&buf[..len]);
            buf.advance(len);
            return apart.freeze();
        }
        buf.split_to(len)
    }

    /// Returns the next receive request, with space for at least `missing` bytes contiguous with the staged ones.
    /// `other` allocates a buffer where a small one is too short and no large one is left.
    ///
    /// # Panics
    /// When a receive is in flight already.
    pub fn want(&mut self, missing: usize, pools: &StagingPools, other: impl FnOnce() -> BufMut) -> ReceiveRequest {
        let mut staged = self.buf.take().expect("one receive at a time");
        if staged.is_empty() {
            staged.reclaim();
        }
        let none_left = pools.large.outstanding() >= LARGE_MAX;
        let small = (!self.large || none_left) && staged.len() + missing <= SMALL;
        let size = if small { SMALL } else { LARGE };
        if staged.spare() >= missing.max(size / 4) && staged.capacity() <= size {
            return ReceiveRequest { buf: staged, all: false };
        }
        let mut next = match (small, none_left) {
            (true, _) => pools.small.get(),
            (false, false) => pools.large.get(),
            (false, true) => other(),
        };
        next.extend_from_slice(&staged);
        ReceiveRequest { buf: next, all: false }
    }

    /// Takes back the buffer of [`want`](Self::want) with `got` more bytes in it.
    pub fn received(&mut self, buf: BufMut, got: usize) {
        let filled = buf.spare() == 0;
        self.buf = Some(buf);
        if self.large {
            self.quiet = if got < SMALL / 2 { self.quiet + 1 } else { 0 };
            if self.quiet >= QUIET_RECEIVES {
                self.large = false;
                self.quiet = 0;
            }
        } else if filled && got >= SMALL / 4 {
            self.large = true;
            self.quiet = 0;
        }
    }

    /// Takes back the buffer of [`want`](Self::want) with no more bytes in it: the stream has ended.
    pub fn ended(&mut self, buf: BufMut) {
        self.buf = Some(buf);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn receive(staging: &mut ReceiveStaging, pools: &StagingPools, got: usize) -> usize {
        let ReceiveRequest { mut buf, all } = staging.want(0, pools, || panic!("a large one is left"));
        assert!(!all);
        let got = got.min(buf.spare());
        let len = buf.len() + got;
        buf.set_len(len);
        let capacity = buf.capacity();
        staging.received(buf, got);
        capacity
    }

    fn consume(staging: &mut ReceiveStaging) {
        let staged = staging.staged().unwrap();
        let len = staged.len();
        staged.advance(len);
    }

    #[test]
    fn it_grows_with_much_and_shrinks_with_little() {
        let pools = StagingPools::new(4);
        let mut staging = ReceiveStaging::new(pools.small());
        assert_eq!(receive(&mut staging, &pools, SMALL), SMALL);
        consume(&mut staging);
        assert_eq!(receive(&mut staging, &pools, 100), LARGE);
        for _ in 1..QUIET_RECEIVES {
            consume(&mut staging);
            assert_eq!(receive(&mut staging, &pools, 100), LARGE);
        }
        consume(&mut staging);
        assert_eq!(receive(&mut staging, &pools, 100), SMALL);
        assert_eq!(pools.large.outstanding(), 0);
    }

    #[test]
    fn what_has_to_lie_in_one_piece_does() {
        let pools = StagingPools::new(4);
        let mut first = pools.small();
        first.extend_from_slice(b"header");
        let mut staging = ReceiveStaging::new(first);
        let ReceiveRequest { buf, .. } = staging.want(SMALL, &pools, || panic!("a large one is left"));
        assert!(buf.spare() >= SMALL);
        assert_eq!(&buf[..], b"header");
        assert!(staging.staged().is_none() && staging.is_empty());
        staging.ended(buf);
        assert!(!staging.is_empty());
    }

    #[test]
    fn who_comes_late_makes_do_with_less() {
        let pools = StagingPools::new(4);
        let taken: Vec<_> = (0..LARGE_MAX).map(|_| pools.large.get()).collect();
        let mut staging = ReceiveStaging::new(pools.small());
        assert_eq!(receive(&mut staging, &pools, SMALL), SMALL);
        let cut = staging.cut(SMALL, &pools);
        assert_eq!(cut.len(), SMALL);
        assert_eq!(receive(&mut staging, &pools, 1), SMALL);
        let ReceiveRequest { buf, .. } = staging.want(2 * SMALL, &pools, || BufMut::with_capacity(4 * SMALL));
        assert_eq!((buf.capacity(), buf.len()), (4 * SMALL, 1));
        drop(taken);
    }

    #[test]
    fn what_is_short_keeps_no_large_buffer_where_they_are_scarce() {
        let pools = StagingPools::new(4);
        let mut crowd: Vec<_> = (0..CROWDED).map(|_| pools.large.get()).collect();
        let mut buf = pools.large.get();
        buf.extend_from_slice(&[7; 600]);
        let mut staging = ReceiveStaging::new(buf);
        assert_eq!(staging.cut(100, &pools).retained(), SMALL);
        crowd.pop();
        assert_eq!(&staging.cut(500, &pools)[..], [7; 500]);
        assert!(staging.is_empty());
    }
}

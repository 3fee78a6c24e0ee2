//! What all loops have in common: how long requests and answers are, and how they are counted.

use std::time::{Duration, Instant};

use forebay_messenger::wire::frame::{CRC_LEN, EPILOGUE_CRC_LEN, PREAMBLE_LEN};
use forebay_messenger::wire::header::HEADER_LEN;

/// Bytes of an answer: as many as a message without payload has on the wire.
pub const ANSWER: usize = PREAMBLE_LEN + HEADER_LEN + CRC_LEN;
/// Bytes received at a time.
pub const RECEIVE: usize = 256 << 10;
/// Not counted, at first.
const WARM_UP: Duration = Duration::from_millis(200);

/// Bytes of a request: as many as a message with so much payload has on the wire.
pub fn request(payload: usize) -> usize {
    if payload == 0 { ANSWER } else { ANSWER + payload + EPILOGUE_CRC_LEN }
}

/// What a client does.
pub struct Shape {
    /// Bytes of a request.
    pub request: usize,
    /// Requests under way.
    pub depth: usize,
    /// For so long.
    pub seconds: f64,
}

/// The client's count: answers, and how many requests may be sent.
pub struct Tally {
    /// Requests that may be sent now.
    pub credits: usize,
    warm: Instant,
    end: Instant,
    begin: Option<Instant>,
    received: usize,
    messages: u64,
}

impl Tally {
    pub fn new(shape: &Shape) -> Self {
        let warm = Instant::now() + WARM_UP;
        let end = warm + Duration::from_secs_f64(shape.seconds);
        Self { credits: shape.depth, warm, end, begin: None, received: 0, messages: 0 }
    }

    /// Looks at the clock: false when the time is over.
    pub fn goes_on(&mut self) -> bool {
        let time = Instant::now();
        if self.begin.is_none() && time >= self.warm {
            (self.begin, self.messages) = (Some(time), 0);
        }
        time < self.end
    }

    /// So many bytes of answers came.
    pub fn received(&mut self, got: usize) {
        self.received += got;
        let answers = self.received / ANSWER;
        self.received %= ANSWER;
        self.credits += answers;
        self.messages += answers as u64;
    }

    pub fn report(&self) {
        let seconds = self.begin.expect("it ran").elapsed().as_secs_f64();
        println!("{{\"messages_per_s\":{:.1}}}", self.messages as f64 / seconds);
    }
}

/// The server's count of requests.
pub struct Requests {
    request: usize,
    received: usize,
}

impl Requests {
    pub fn new(request: usize) -> Self {
        Self { request, received: 0 }
    }

    /// So many bytes came; returns how many requests are whole by that.
    pub fn received(&mut self, got: usize) -> usize {
        self.received += got;
        let whole = self.received / self.request;
        self.received %= self.request;
        whole
    }
}

/// Says where it listens.
pub fn bound(addr: &str) {
    println!("{addr}");
}

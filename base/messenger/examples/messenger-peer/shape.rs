//! Common parts of all loops: request and answer lengths, and their counters.

use std::time::{Duration, Instant};

use forebay_messenger::wire::frame::{CRC_LEN, EPILOGUE_CRC_LEN, PREAMBLE_LEN};
use forebay_messenger::wire::header::HEADER_LEN;

/// Length of an answer in bytes: that of a message without payload on the wire.
pub const ANSWER: usize = PREAMBLE_LEN + HEADER_LEN + CRC_LEN;
/// Maximum number of bytes received at a time.
pub const RECEIVE: usize = 256 << 10;
/// Warm-up time, which is not counted.
const WARM_UP: Duration = Duration::from_millis(200);

/// Returns the length of a request in bytes: that of a message with this payload on the wire.
pub fn request(payload: usize) -> usize {
    if payload == 0 { ANSWER } else { ANSWER + payload + EPILOGUE_CRC_LEN }
}

/// Load of a client.
pub struct Shape {
    /// Length of a request in bytes.
    pub request: usize,
    /// Requests in flight.
    pub depth: usize,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Client counters: answers received, and requests that may be sent.
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

    /// Records the receipt of `got` bytes of answers.
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

/// Server's counter of requests.
pub struct Requests {
    request: usize,
    received: usize,
}

impl Requests {
    pub fn new(request: usize) -> Self {
        Self { request, received: 0 }
    }

    /// Records the receipt of `got` bytes; returns the number of requests completed by them.
    pub fn received(&mut self, got: usize) -> usize {
        self.received += got;
        let whole = self.received / self.request;
        self.received %= self.request;
        whole
    }
}

/// Prints the address that the server listens at.
pub fn bound(addr: &str) {
    println!("{addr}");
}

//! Whether writes go round a log that cannot keep up.
//!
//! A log that has been filling up for a while lets writes in only as fast as it is written back, one generation after
//! the other.  A host with many requests in flight may get more from the backend itself.  Whether it does is measured:
//! the log is emptied under ever stronger pressure, writes go to the backend for a while, and whichever of the two
//! was faster is used, and the other one tried again later.  Nothing of this decides whether a single write *may* go
//! round: that is [`State::may_go_round`](crate::state::State).

use std::time::Duration;

use forebay_reactor::Instant;

/// From this fill on writes are held back.
const CROWDED_FILL: f64 = 0.5;
/// The log has to be that full for so long.
const CROWDED_FOR: Duration = Duration::from_millis(250);
/// How much more the backend must seem to give before it is tried.
const WORTH: f64 = 1.1;
/// How long the pressure takes to rise to its highest while the log is emptied.
const RAMP: Duration = Duration::from_millis(500);
/// The log counts as much fuller than it is while it is emptied: by the inverse of this at last.
const SCALE_MIN: f64 = 0.02;
/// With so few entries left writes wait for the rest.
const FEW: u64 = 256;
/// A log that is not empty after that stays in use.
const LEAVING_MAX: Duration = Duration::from_secs(10);
/// Going round is judged after so long.
const TRIAL: Duration = Duration::from_millis(500);
/// How long writes go round before the log is tried again: at first, and at most.
const STAY: (Duration, Duration) = (Duration::from_secs(4), Duration::from_secs(32));
/// How long going round is not tried again when it was no faster: at first, and at most.
const REST: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(80));
/// A host that has not written for so long is not overloading anything.
const IDLE: Duration = Duration::from_millis(100);
/// How much a new measurement counts.
const NEWEST: f64 = 0.1;

/// What the log knows when a write comes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Look {
    pub(crate) now: Instant,
    /// How full the log is, 0 to 1.
    pub(crate) fill: f64,
    /// Changes under way or held back.
    pub(crate) depth: usize,
    /// Bytes of this one.
    pub(crate) bytes: u64,
    /// Bytes a second that writing back brings to the backend; 0 when it is not known.
    pub(crate) back_rate: f64,
    /// Entries in the log.
    pub(crate) left: u64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Phase {
    /// Writes go to the log.
    Log,
    /// It is being emptied.
    Leaving { since: Instant },
    /// Writes go round it where they may.
    Round { since: Instant, bytes: u64, to_beat: f64, judged: bool },
}

/// Which way writes go.
#[derive(Debug)]
pub(crate) struct Detour {
    phase: Phase,
    crowded_since: Option<Instant>,
    /// Not to be tried before.
    not_before: Instant,
    stay: Duration,
    rest: Duration,
    last: Instant,
    /// Seconds that the backend takes for a write, on average.
    write_s: f64,
}

impl Default for Detour {
    fn default() -> Self {
        let zero = Instant::default();
        let (stay, rest) = (STAY.0, REST.0);
        Self { phase: Phase::Log, crowded_since: None, not_before: zero, stay, rest, last: zero, write_s: 0.0 }
    }
}

impl Detour {
    /// Writes go round where they may.
    pub(crate) fn is_round(&self) -> bool {
        matches!(self.phase, Phase::Round { .. })
    }

    /// What is in the log should leave it soon.
    pub(crate) fn is_hasty(&self) -> bool {
        self.phase != Phase::Log
    }

    /// The backend took so long for a write.
    pub(crate) fn backend_took(&mut self, took: Duration) {
        let now = took.as_secs_f64();
        self.write_s = if self.write_s == 0.0 { now } else { self.write_s + NEWEST * (now - self.write_s) };
    }

    /// A write has gone round.
    pub(crate) fn went_round(&mut self, more: u64) {
        if let Phase::Round { bytes, .. } = &mut self.phase {
            *bytes += more;
        }
    }

    /// The backend refuses writes; the log can wait for it.
    pub(crate) fn failed(&mut self, now: Instant) {
        if self.is_round() {
            self.give_up(now);
        }
    }

    /// A log of this fill counts as so full.
    pub(crate) fn crowding(&self, fill: f64, now: Instant) -> f64 {
        match self.phase {
            Phase::Leaving { since } => {
                let done = (now - since).as_secs_f64() / RAMP.as_secs_f64();
                (fill / (1.0 - done).max(SCALE_MIN)).min(1.0)
            }
            _ => fill,
        }
    }

    /// A write comes: which way from now on.
    pub(crate) fn look(&mut self, look: Look) {
        let Look { now, fill, .. } = look;
        let idle = now - self.last >= IDLE;
        self.last = now;
        match self.phase {
            Phase::Log => {
                if fill < CROWDED_FILL || idle {
                    self.crowded_since = None;
                    return;
                }
                let since = *self.crowded_since.get_or_insert(now);
                if now - since >= CROWDED_FOR && now >= self.not_before && self.seems_worth_it(look) {
                    self.phase = Phase::Leaving { since: now };
                }
            }
            Phase::Leaving { .. } if idle => self.back_to_log(),
            Phase::Leaving { since } => {
                if look.left <= FEW {
                    self.phase = Phase::Round { since: now, bytes: 0, to_beat: look.back_rate, judged: false };
                } else if now - since >= LEAVING_MAX {
                    self.give_up(now);
                }
            }
            Phase::Round { .. } if idle => self.back_to_log(),
            Phase::Round { since, bytes, to_beat, judged } => {
                let took = now - since;
                if !judged && took >= TRIAL {
                    if (bytes as f64) < to_beat * took.as_secs_f64() {
                        self.give_up(now);
                        return;
                    }
                    self.phase = Phase::Round { since, bytes, to_beat, judged: true };
                    self.rest = REST.0;
                } else if took >= self.stay {
                    self.back_to_log();
                    self.stay = (self.stay * 2).min(STAY.1);
                }
            }
        }
    }

    /// With so many requests at once the backend would give more than writing back brings to it.
    fn seems_worth_it(&self, look: Look) -> bool {
        let rate = look.depth as f64 * look.bytes as f64 / self.write_s;
        self.write_s > 0.0 && look.back_rate > 0.0 && rate > look.back_rate * WORTH
    }

    fn back_to_log(&mut self) {
        (self.phase, self.crowded_since) = (Phase::Log, None);
    }

    fn give_up(&mut self, now: Instant) {
        self.back_to_log();
        self.not_before = now + self.rest;
        self.rest = (self.rest * 2).min(REST.1);
        self.stay = STAY.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: f64 = 100e-6;

    /// A host that writes as fast as it may for so many seconds: bytes a second in all, and the share of time that
    /// writes went round.  The log takes 200 MB/s while there is room, writing back brings `back` to the backend, which
    /// gives `direct` to the host itself; `took` is what it seems to take for a write with 128 at once.
    fn host(seconds: f64, back: f64, direct: f64, took: f64) -> (f64, f64) {
        const CAPACITY: f64 = 32e6;
        let (mut detour, mut used, mut written, mut round) = (Detour::default(), 0.0_f64, 0.0, 0.0);
        detour.backend_took(Duration::from_secs_f64(took));
        let mut time = 0.0;
        while time < seconds {
            let now = Instant::from_nanos(1_000_000_000 + (time * 1e9) as u64);
            let (fill, left) = (used / CAPACITY, (used / 4096.0) as u64);
            detour.look(Look { now, fill, depth: 128, bytes: 4096, back_rate: back, left });
            let rate = if detour.is_round() {
                round += STEP;
                detour.went_round((direct * STEP) as u64);
                direct
            } else {
                let crowding = detour.crowding(fill, now);
                let over = ((crowding - 0.5) / 0.4).max(0.0).powi(2);
                let rate = if over > 0.0 { (back / over).min(200e6) } else { 200e6 };
                used += rate * STEP;
                rate
            };
            used = (used - back * STEP).max(0.0);
            written += rate * STEP;
            time += STEP;
        }
        (written / seconds, round / seconds)
    }

    #[test]
    fn a_faster_backend_is_used_and_a_slower_one_left_alone() {
        let (rate, round) = host(60.0, 40e6, 100e6, 4096.0 * 128.0 / 100e6);
        assert!(rate > 0.9 * 100e6 && round > 0.8, "{rate} {round}");
        // Even where it looks better than it is.
        let (rate, round) = host(60.0, 40e6, 20e6, 4096.0 * 128.0 / 100e6);
        assert!(rate > 0.93 * 40e6 && round < 0.05, "{rate} {round}");
        // And where it does not.
        let (rate, round) = host(60.0, 40e6, 20e6, 4096.0 * 128.0 / 20e6);
        assert!(rate > 0.99 * 40e6 && round == 0.0, "{rate} {round}");
    }

    #[test]
    fn it_takes_a_lasting_overload() {
        let mut detour = Detour::default();
        detour.backend_took(Duration::from_millis(1));
        let at = |ms: u64| Instant::from_nanos(1_000_000_000 + ms * 1_000_000);
        let look = |ms, fill, left| Look { now: at(ms), fill, depth: 64, bytes: 4096, back_rate: 1e6, left };
        // A short one.
        (0..20).for_each(|ms| detour.look(look(ms * 10, 0.8, 4000)));
        detour.look(look(205, 0.3, 1000));
        (21..40).for_each(|ms| detour.look(look(ms * 10, 0.8, 4000)));
        assert!(!detour.is_hasty());
        (40..60).for_each(|ms| detour.look(look(ms * 10, 0.8, 4000)));
        assert!(detour.is_hasty() && !detour.is_round());
        assert!(detour.crowding(0.1, at(600)) < detour.crowding(0.1, at(1000)));
        // The host stops: all is as before.
        detour.look(look(5000, 0.0, 0));
        assert!(!detour.is_hasty() && detour.crowding(0.1, at(5000)) == 0.1);
    }

    #[test]
    fn a_backend_that_fails_is_left_to_the_log() {
        let mut detour = Detour::default();
        detour.backend_took(Duration::from_millis(1));
        let at = |ms: u64| Instant::from_nanos(1_000_000_000 + ms * 1_000_000);
        let look = |ms, fill, left| Look { now: at(ms), fill, depth: 64, bytes: 4096, back_rate: 1e6, left };
        (0..60).for_each(|ms| detour.look(look(ms * 10, 0.8, 4000)));
        detour.look(look(600, 0.01, 10));
        assert!(detour.is_round());
        detour.failed(at(601));
        (61..400).for_each(|ms| detour.look(look(ms * 10, 0.8, 4000)));
        assert!(!detour.is_hasty(), "it rests");
    }
}

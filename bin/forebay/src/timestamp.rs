//! Points in time as people and programs read them.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tz::TimeZone;

/// Seconds of a day.
const DAY: u64 = 86_400;
/// The last moment of the year 9999 in seconds since 1970: years have four digits.
const LAST: u64 = 253_402_300_799;

/// A point in time to the second, in seconds since 1970-01-01T00:00:00Z; written as RFC 3339 says, in UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp(pub u64);

/// A date and a time of day, without a time zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Civil {
    year: u64,
    /// From 1.
    month: u64,
    /// From 1.
    day: u64,
    /// Second of the day.
    second: u64,
    /// From 0, a Sunday.
    weekday: u64,
}

impl Civil {
    fn of(seconds: u64) -> Self {
        let (days, second) = (seconds / DAY, seconds % DAY);
        // Howard Hinnant's civil_from_days: years begin in March, eras have 400 years.
        let since = days + 719_468;
        let (era, day_of_era) = (since / 146_097, since % 146_097);
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
        let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
        let year = era * 400 + year_of_era + u64::from(month <= 2);
        // 1970 began on a Thursday.
        Self { year, month, day, second, weekday: (days + 4) % 7 }
    }

    /// The opposite; `None` before 1970.
    fn seconds(self) -> Option<u64> {
        let year = self.year - u64::from(self.month <= 2);
        let (era, year_of_era) = (year / 400, year % 400);
        let month_from_march = (self.month + 9) % 12;
        let day_of_year = (153 * month_from_march + 2) / 5 + self.day - 1;
        let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
        let days = (era * 146_097 + day_of_era).checked_sub(719_468)?;
        Some(days * DAY + self.second)
    }

    fn clock(self) -> (u64, u64, u64) {
        (self.second / 3600, self.second / 60 % 60, self.second % 60)
    }
}

impl Timestamp {
    /// Writes it as C's `ctime` and therefore `rbd` do, in the time zone of this process (`TZ`, `/etc/localtime`):
    /// `Mon Nov 23 19:41:42 2026`.
    pub fn local_text(self) -> String {
        let offset = local_zone().and_then(|zone| {
            let kind = zone.find_local_time_type(i64::try_from(self.0).ok()?).ok()?;
            Some(kind.ut_offset())
        });
        self.text_at(offset.unwrap_or(0))
    }

    /// Formats the time in a zone that is ahead of UTC by this many seconds.
    fn text_at(self, offset: i32) -> String {
        const DAYS: [&str; 7] = ["Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"];
        const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
        let civil = Civil::of(self.0.saturating_add_signed(offset.into()));
        let (hour, minute, second) = civil.clock();
        let (weekday, month) = (DAYS[civil.weekday as usize], MONTHS[civil.month as usize - 1]);
        format!("{weekday} {month} {:>2} {hour:02}:{minute:02}:{second:02} {}", civil.day, civil.year)
    }
}

/// Returns the time zone of this process, read once; `None`: UTC, as C's library has it where nothing is said or what
/// is said is wrong.
fn local_zone() -> Option<&'static TimeZone> {
    static ZONE: OnceLock<Option<TimeZone>> = OnceLock::new();
    let read = || match std::env::var("TZ") {
        Ok(name) if name.is_empty() => None,
        Ok(name) => TimeZone::from_posix_tz(&name).ok(),
        Err(_) => TimeZone::local().ok(),
    };
    ZONE.get_or_init(read).as_ref()
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let civil = Civil::of(self.0);
        let (hour, minute, second) = civil.clock();
        write!(f, "{:04}-{:02}-{:02}T{hour:02}:{minute:02}:{second:02}Z", civil.year, civil.month, civil.day)
    }
}

impl FromStr for Timestamp {
    type Err = String;

    /// Reads what [`Display`](fmt::Display) writes.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}' is no time as 2026-11-23T19:41:42Z");
        let bytes = text.as_bytes();
        let marks = [(4, b'-'), (7, b'-'), (10, b'T'), (13, b':'), (16, b':'), (19, b'Z')];
        if bytes.len() != 20 || marks.iter().any(|&(at, mark)| bytes[at] != mark) {
            return Err(wrong());
        }
        let number = |from: usize, to: usize| {
            let digits = text.get(from..to).filter(|digits| digits.bytes().all(|digit| digit.is_ascii_digit()));
            digits.and_then(|digits| digits.parse::<u64>().ok()).ok_or_else(wrong)
        };
        let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
        let (hour, minute, second) = (number(11, 13)?, number(14, 16)?, number(17, 19)?);
        if year < 1970 || month == 0 || day == 0 || hour > 23 || minute > 59 || second > 59 {
            return Err(wrong());
        }
        let civil = Civil { year, month, day, second: hour * 3600 + minute * 60 + second, weekday: 0 };
        let seconds = civil.seconds().filter(|&seconds| seconds <= LAST).ok_or_else(wrong)?;
        // A day that its month does not have is another day.
        let made = Timestamp(seconds);
        if made.to_string() == text { Ok(made) } else { Err(wrong()) }
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_in_utc_and_back() {
        for (seconds, want) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_200, "2024-03-01T00:00:00Z"),
            (4_102_444_799, "2099-12-31T23:59:59Z"),
            (LAST, "9999-12-31T23:59:59Z"),
        ] {
            assert_eq!(Timestamp(seconds).to_string(), want);
            assert_eq!(want.parse(), Ok(Timestamp(seconds)));
        }
        for wrong in [
            "",
            "2026-11-23",
            "2026-02-30T00:00:00Z",
            "2026-13-01T00:00:00Z",
            "2026-00-01T00:00:00Z",
            "1969-12-31T23:59:59Z",
            "2026-11-23T24:00:00Z",
            "2026-11-23T19:41:42+",
            "2026-11-2\u{e9}T19:41:42Z",
            "+026-11-23T19:41:42Z",
            "1970-01-00T00:00:00Z",
        ] {
            assert!(wrong.parse::<Timestamp>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn times_as_ctime_writes_them() {
        assert_eq!(Timestamp(1_795_462_902).text_at(0), "Mon Nov 23 19:41:42 2026");
        assert_eq!(Timestamp(1_795_462_902).text_at(-5 * 3600), "Mon Nov 23 14:41:42 2026");
        assert_eq!(Timestamp(1_795_462_902).text_at(5 * 3600), "Tue Nov 24 00:41:42 2026");
        assert_eq!(Timestamp(0).text_at(0), "Thu Jan  1 00:00:00 1970");
        assert_eq!(Timestamp(5).text_at(-60), "Thu Jan  1 00:00:00 1970", "nothing is before that");
    }
}

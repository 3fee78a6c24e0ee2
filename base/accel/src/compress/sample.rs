//! Telling early that data will not shrink, from a few per cent of the work of trying.
//!
//! Two looks.  The first counts the bytes of samples spread over the data: text, code and tables have an entropy well
//! below eight bits, and most data is let through here.  What looks random may still repeat itself (copies of an
//! encrypted page, say), so the second look asks of all aligned words how many occur twice.

/// Samples, and the length of each, in bytes.
const SAMPLES: usize = 64;
const SAMPLE: usize = 64;

/// Below this many bytes trying costs less than looking.
const LENGTH_MIN: usize = 2048;

/// Slots for words that were seen.
const WORDS: usize = 4096;

/// Returns true if the data is not expected to shrink below `percent` per cent of its length.
///
/// Heuristic with errors both ways: admitted data may turn out not to shrink, and rejected data might have shrunk by
/// less than a tenth, or by repetitions that are not aligned to four bytes.
pub fn looks_incompressible(data: &[u8], percent: u8) -> bool {
    if data.len() < LENGTH_MIN {
        return false;
    }
    let goal = f64::from(percent.min(100)) / 100.0;
    // Literals alone would come to this share of the length.
    entropy_bits(data) / 8.0 >= goal.min(0.97) && repeated_share(data) < 1.0 - goal.min(0.95)
}

/// Bits a byte, estimated from samples.
fn entropy_bits(data: &[u8]) -> f64 {
    let mut counts = [0u16; 256];
    let step = (data.len() / SAMPLES).max(SAMPLE);
    let mut total = 0;
    for sample in data.chunks(step) {
        let sample = &sample[..sample.len().min(SAMPLE)];
        sample.iter().for_each(|&byte| counts[usize::from(byte)] += 1);
        total += sample.len();
    }
    let total = total as f64;
    let (mut bits, mut kinds) = (0.0, 0.0);
    for count in counts.into_iter().filter(|&count| count > 0).map(f64::from) {
        bits += count * (total / count).log2();
        kinds += 1.0;
    }
    // A small sample shows less entropy than there is; Miller and Madow's correction.
    bits / total + (kinds - 1.0) / (2.0 * total * std::f64::consts::LN_2)
}

/// Returns the share of aligned eight-byte words that have occurred shortly before.
fn repeated_share(data: &[u8]) -> f64 {
    let mut seen = [0u32; WORDS];
    let (mut repeated, mut total) = (0u32, 0u32);
    for word in data.chunks_exact(8) {
        let word = u64::from_le_bytes(word.try_into().unwrap_or_default());
        let mixed = (word ^ word >> 29).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        // The slot's place is the upper bits, and its content bits that are not part of the place.
        let place = &mut seen[(mixed >> 52) as usize % WORDS];
        let mark = (mixed >> 16) as u32 | 1;
        repeated += u32::from(std::mem::replace(place, mark) == mark);
        total += 1;
    }
    f64::from(repeated) / f64::from(total.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(length: usize) -> Vec<u8> {
        let mut state = 0x1234_5678_9ABC_DEFFu64;
        let mut data = Vec::new();
        while data.len() < length {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            data.extend_from_slice(&(state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16).to_le_bytes()[..4]);
        }
        data
    }

    #[test]
    fn noise_is_held_back_and_text_is_not() {
        assert!(looks_incompressible(&noise(4096), 90));
        assert!(looks_incompressible(&noise(128 << 10), 90));
        let text = include_bytes!("sample.rs").repeat(10);
        assert!(!looks_incompressible(&text, 90));
        assert!(!looks_incompressible(&vec![0; 8192], 50));
    }

    #[test]
    fn noise_that_repeats_itself_is_let_through() {
        let page = noise(4096);
        assert!(!looks_incompressible(&page.repeat(8), 90));
    }

    #[test]
    fn what_is_half_text_is_let_through() {
        let mut data = noise(32 << 10);
        data.extend_from_slice(&include_bytes!("sample.rs").repeat(20)[..32 << 10]);
        assert!(!looks_incompressible(&data, 90));
    }

    #[test]
    fn short_data_is_tried() {
        assert!(!looks_incompressible(&noise(1000), 90));
    }
}

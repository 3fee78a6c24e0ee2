//! Mutations of a stream of PDUs.

use forebay_load::Dice;

/// Values that lie at the edge of something.
const EDGES: [u8; 8] = [0, 1, 0x3f, 0x40, 0x7f, 0x80, 0xfe, 0xff];
/// The same, for fields of four bytes.
const LONG_EDGES: [u32; 8] = [0, 1, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff, 0xffff_fffe, 0x00ff_ffff, 0x0100_0000];

/// Bytes at the beginning of a PDU that are hit most, because they say what the rest is.
const HEAD: usize = 72;

/// Makes one to four things go wrong with PDUs that are to be sent one after the other.
pub fn mutate(dice: &mut Dice, pdus: &mut Vec<Vec<u8>>) {
    for _ in 0..1 + dice.below(4) {
        if pdus.is_empty() {
            return;
        }
        let at = dice.below(pdus.len());
        match dice.below(12) {
            0..=3 => damage(dice, &mut pdus[at]),
            4 | 5 => edge(dice, &mut pdus[at]),
            6 => {
                let len = dice.below(pdus[at].len() + 1);
                pdus[at].truncate(len);
            }
            7 => drop(pdus.remove(at)),
            8 => {
                let other = dice.below(pdus.len());
                pdus.swap(at, other);
            }
            9 => {
                let again = pdus[at].clone();
                for _ in 0..1 + dice.below(3) {
                    pdus.insert(at, again.clone());
                }
            }
            10 => {
                let noise = (0..1 + dice.below(200)).map(|_| dice.roll() as u8).collect();
                pdus.insert(at, noise);
            }
            // The stream ends here.
            _ => pdus.truncate(at + 1),
        }
    }
}

fn place(dice: &mut Dice, len: usize) -> usize {
    if dice.once_in(4) { dice.below(len) } else { dice.below(len.min(HEAD)) }
}

fn damage(dice: &mut Dice, pdu: &mut [u8]) {
    if pdu.is_empty() {
        return;
    }
    for _ in 0..1 + dice.below(3) {
        let at = place(dice, pdu.len());
        pdu[at] = match dice.below(3) {
            0 => pdu[at] ^ 1 << dice.below(8),
            1 => dice.pick(&EDGES),
            _ => dice.roll() as u8,
        };
    }
}

fn edge(dice: &mut Dice, pdu: &mut [u8]) {
    if pdu.len() < 4 {
        return;
    }
    let at = place(dice, pdu.len() - 3) & !3;
    let value = dice.pick(&LONG_EDGES);
    let bytes = if dice.once_in(2) { value.to_be_bytes() } else { value.to_le_bytes() };
    pdu[at..at + 4].copy_from_slice(&bytes);
}

//! The loops of the kernels, chosen for this processor.

use std::time::Instant;

use forebay_accel::Tier;
use forebay_accel::shape::{self, Choice};

/// Chooses the loops of the kernels for this processor, for a program that runs for long.
pub fn calibrate() -> &'static [Choice] {
    let begin = Instant::now();
    shape::calibrate(&mut || begin.elapsed())
}

/// Chooses the kernels' loops for this processor, before the reactors start and anything is served.
pub fn choose() {
    let begin = Instant::now();
    let choices = calibrate();
    let milliseconds = begin.elapsed().as_millis() as u64;
    for choice in choices {
        let (kernel, sizes, shape, reason) = (choice.kernel, choice.class, choice.shape, &choice.reason);
        tracing::debug!(kernel, sizes, shape, %reason, "loop of a kernel");
    }
    let other = choices.iter().filter(|choice| choice.shape != choice.default).count();
    tracing::info!(tier = %Tier::current(), choices = choices.len(), other_than_default = other, milliseconds, "kernels chosen");
}

#[cfg(test)]
mod tests {
    use forebay_accel::perf::{Detail, kernels};

    use super::*;

    #[test]
    fn the_choice_is_made_once_and_is_what_calls_use() {
        let first = calibrate().to_vec();
        assert_eq!(calibrate(), first);
        assert_eq!(shape::choices(), first);
        if let Some(choice) = first.iter().find(|choice| choice.kernel == "crc32c" && choice.class == "3 KiB to 12 KiB")
        {
            let kernel = kernels(Detail::Shapes).into_iter().find(|kernel| kernel.name == "crc32c 4 KiB");
            assert_eq!(kernel.map(|kernel| kernel.chosen), Some(format!("{}/{}", Tier::current(), choice.shape)));
        }
    }
}

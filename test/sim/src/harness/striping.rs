//! Striping of images, drawn from the seed.

use forebay_image::Striping;

use crate::oracle::BLOCK;
use crate::rng::Rng;

/// Draws the striping of an image with objects of this size: most of them have none. A block of the oracle is in one object.
pub(super) fn draw_striping(rng: &mut Rng, object_size: u64) -> Option<Striping> {
    rng.one_in(3).then(|| {
        let unit = *rng.pick(&[BLOCK, 4 * BLOCK, object_size / 2, object_size]);
        Striping { unit, count: rng.range(1..6) }
    })
}

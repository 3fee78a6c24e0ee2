//! Changes of an image, compared with the model.

use std::rc::Rc;

use forebay_block::Result;
use forebay_image::Image;

use super::{Known, wrong};

/// Compares the changes since the image was empty, and since a snapshot, with the contents.
pub(super) async fn check_changes(image: &Rc<Image>, snapshot: Option<&Known>, after: &[u8]) -> Result<()> {
    check_since(image, None, &[], after).await?;
    match snapshot {
        Some(known) => check_since(image, Some(&known.name), &known.content, after).await,
        None => Ok(()),
    }
}

async fn check_since(image: &Rc<Image>, from: Option<&str>, before: &[u8], after: &[u8]) -> Result<()> {
    let lie = |what: &str, at: usize| {
        let since = from.unwrap_or("the beginning");
        Err(wrong(format!("the changes of {} since {since} {what} at {at}", image.name())))
    };
    let is_changed = |at: usize| before.get(at).copied().unwrap_or_default() != after[at];
    let mut at = 0;
    let mut changes = image.changes(from, false).await?;
    while let Some(ranges) = changes.next().await? {
        for range in ranges {
            let bytes = range.extent.offset as usize..range.extent.end() as usize;
            if bytes.start < at || bytes.end > after.len() {
                return lie("are out of order or past the end", bytes.start);
            }
            if let Some(missed) = (at..bytes.start).find(|&at| is_changed(at)) {
                return lie("lack a byte", missed);
            }
            if let Some(other) = bytes.clone().find(|&at| !range.exists && after[at] != 0) {
                return lie("call a byte zero that is not", other);
            }
            at = bytes.end;
        }
    }
    match (at..after.len()).find(|&at| is_changed(at)) {
        Some(missed) => lie("lack a byte", missed),
        None => Ok(()),
    }
}

//! Encrypted logs that have members: copies are held without the key, and taken over with it.

use forebay_block::{BlockDevice, BlockRequest, Buf, DataKey, ErrorKind};
use forebay_reactor::pmem::PersistentMemory;
use forebay_reactor::timeout;
use forebay_writelog::MediumKind;

use super::{path, with_media};
use crate::common::{LONG, read};

const MARKER: &[u8; 32] = b"a text that nobody else may read";

fn key(byte: u8) -> DataKey {
    DataKey::from_bytes(&std::array::from_fn(|at| byte ^ at as u8))
}

#[test]
fn an_encrypted_log_is_taken_over_with_its_key_only() {
    const SSD: MediumKind = MediumKind::Ssd;
    for media in [[SSD; 3], [MediumKind::Pmem; 3], [SSD, MediumKind::Pmem, SSD], [MediumKind::Dram; 3]] {
        with_media(&media, async |world, memories, hosts| {
            let [one, two, three] = &hosts[..] else { unreachable!("three hosts") };
            one.key.replace(Some(key(1)));
            let (id, primary) = one.create().await;
            assert!(primary.log.is_encrypted());
            one.wanted.replace(vec![two.id]);
            primary.has(&[1, 2]).await;
            let write = |number: u64| {
                let mut data = MARKER.repeat(150);
                data.truncate(4700 - number as usize);
                (number * 8192, data)
            };
            for number in 0..6 {
                let (offset, data) = write(number);
                let request = BlockRequest::Write { offset, data: Buf::copy_of(&data).into(), fua: false };
                primary.log.submit(request).await.expect("written");
                if number == 3 {
                    // One that is filled from what is on the primary's medium.
                    one.wanted.replace(vec![two.id, three.id]);
                    primary.set.wanted_changed();
                    primary.has(&[1, 2, 3]).await;
                }
            }
            for host in &hosts {
                assert!(host.shelf.inspect_superblock(&id).await.expect("a copy").encrypted, "{media:?}");
            }
            for (number, memory) in (1..).zip(&memories) {
                let mut bytes = world.peek(path(number), 0, 16 << 20).expect("a disk");
                let mut more = vec![0; 16 << 20];
                memory.load(0, &mut more);
                bytes.append(&mut more);
                assert!(bytes.windows(8).all(|found| found != &MARKER[..8]), "host {number} of {media:?}");
            }
            let record = two.image.record.borrow().clone();
            for (wrong, says) in [(None, "no key was given"), (Some(key(2)), "encrypted with another key")] {
                two.key.replace(wrong);
                let refused = two.take_over(&id).await.err().expect("refused");
                assert_eq!(refused.kind(), ErrorKind::Denied, "{refused}");
                assert!(refused.to_string().contains(says), "{refused}");
            }
            // Nothing was changed, and nobody fenced: the log is served as before.
            assert_eq!(*two.image.record.borrow(), record);
            assert!(two.image.fenced.borrow().is_empty());
            primary.write(90 << 10, 5).await.expect("written");
            one.kill();
            two.key.replace(Some(key(1)));
            let taken = timeout(LONG, two.take_over(&id)).await.expect("in time").expect("its key");
            timeout(LONG, taken.log.acquired()).await.expect("in time").expect("served");
            for number in 0..6 {
                let (offset, data) = write(number);
                assert!(read(&*taken.log, offset, data.len() as u64).await == data, "write {number} of {media:?}");
            }
            timeout(LONG, taken.log.drain()).await.expect("in time").expect("written back");
            for number in 0..6 {
                let (offset, data) = write(number);
                assert!(two.image.base.bytes.borrow()[offset as usize..][..data.len()] == data[..]);
            }
        });
    }
}

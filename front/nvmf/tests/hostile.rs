//! Tests of misbehaving hosts: they lose at most their own connection, and cost the target no more memory than
//! its limits.

mod common;

use std::time::Duration;

use common::*;
use forebay_block::{Buf, BufMut};
use forebay_nvmf::session::Transfers;
use forebay_nvmf::stats::NvmeCommandKind;
use forebay_nvmf::wire::command::{FABRICS, Sgl};
use forebay_nvmf::wire::fabrics::fctype;
use forebay_nvmf::wire::pdu::{DataHeader, kind};
use forebay_nvmf::wire::{NvmeStatus, Sqe, u16_at, u64_at};
use forebay_nvmf::{AnaGrouping, HostLimits};

/// Sends `count` commands without reading the responses; returns `None` if that takes more than a minute.
async fn flood(host: &Host, count: u16, command: impl Fn(u16) -> Sqe) -> Option<()> {
    let bytes: Vec<u8> = (0..count).flat_map(|cid| capsule(&command(cid), &[])).collect();
    soon(host.send(&bytes)).await
}

#[test]
fn who_does_not_read_the_answers_is_not_read_either() {
    simulate(HostLimits::default(), |_, _, _| async move {
        const COUNT: u16 = 60_000;
        let (_admin, cntlid) = Host::admin().await;
        let mut host = Host::io(cntlid, 1, 128).await;
        assert_eq!(flood(&host, COUNT, |cid| Sqe::new(nvm::FLUSH, cid, NSID)).await, None, "all of it was taken");
        // The send was given up, but commands that were taken are completed.
        let (cid, status) = host.pdu().await.expect("an answer").response();
        assert!(cid == 0 && status.is_success());
    });
}

#[test]
fn a_host_that_reads_late_gets_every_answer() {
    simulate(HostLimits::default(), |_, _, _| async move {
        const COUNT: u16 = 20_000;
        let (_admin, cntlid) = Host::admin().await;
        let mut host = Host::io(cntlid, 1, 128).await;
        let bytes: Vec<u8> = (0..COUNT).flat_map(|cid| capsule(&Sqe::new(nvm::FLUSH, cid, NSID), &[])).collect();
        let stream = host.stream.clone();
        let sending = forebay_reactor::spawn(async move { stream.send(Buf::copy_of(&bytes)).await });
        assert_eq!(soon(std::future::pending::<()>()).await, None);
        for _ in 0..COUNT {
            assert!(soon(host.pdu()).await.flatten().expect("an answer").response().1.is_success());
        }
        sending.await.expect("all is sent");
    });
}

#[test]
fn log_pages_that_are_not_read_do_not_pile_up() {
    simulate(HostLimits::default(), |server, _, _| async move {
        let (admin, _) = Host::admin().await;
        let log = |cid| {
            let sqe = Sqe::new(admin_opcode::GET_LOG, cid, 0).with(10, 0xFFFF << 16 | 0x0C).with(11, 3);
            sqe.with_sgl(Sgl::Transport { len: 1 << 20 })
        };
        assert_eq!(flood(&admin, 4000, log).await, None, "all of it was taken");
        let held = server.bytes_held();
        assert!(held <= 32 << 20, "{held} bytes are held");
    });
}

#[test]
fn data_in_tiny_pieces_takes_no_more_memory_than_the_command() {
    const LEN: u32 = 256 * 1024;
    let mut transfers = Transfers::default();
    let tag = transfers.begin(5, LEN, 0, ());
    let mut whole = None;
    for offset in 0..LEN {
        // Each one-byte piece keeps a receive buffer in memory.
        let mut staging = BufMut::with_capacity(4096);
        staging.extend_from_slice(&[offset as u8; 4]);
        let header = DataHeader { cid: 5, tag, offset, len: 1 };
        transfers.check(&header, offset + 1 == LEN).expect("it comes in order");
        assert!(whole.is_none());
        whole = transfers.arrived(&header, staging.split_to(1).into(), true);
    }
    let ((), data, intact) = whole.expect("all of it is there");
    assert!(intact);
    let kept: usize = data.parts().iter().map(|part| part.retained()).sum();
    assert!(kept <= 2 * LEN as usize, "{kept} bytes are kept for {LEN}");
    assert!(data.to_vec().iter().enumerate().all(|(at, &byte)| byte == at as u8));
}

#[test]
fn a_namespace_can_go_although_a_host_owes_data_for_it() {
    simulate(HostLimits::default(), |server, disk, _| async move {
        let (_admin, cntlid) = Host::admin().await;
        let mut host = Host::io(cntlid, 1, 128).await;
        let write = blocks(nvm::WRITE, 3, 0, 256).with_sgl(Sgl::Transport { len: 128 << 10 });
        host.send(&capsule(&write, &[])).await;
        let asked = host.pdu().await.expect("R2T");
        assert_eq!(asked.kind, kind::R2T);
        subsystem(&server).remove_namespace(NSID);
        soon(server.let_go(&subsystem(&server), NSID)).await.expect("nothing waits for the host");
        let begun = disk.begun.get();
        // The host sends the data after all, and gets an error.
        host.send(&h2c_data(3, asked.data_header().tag, 0, &[1; 128 << 10], true)).await;
        let (cid, status) = host.pdu().await.expect("an answer").response();
        assert_eq!((cid, status.code()), (3, NvmeStatus::INVALID_NAMESPACE.code()));
        assert_eq!(disk.begun.get(), begun, "nothing was written");
    });
}

#[test]
fn a_command_that_waits_while_the_device_is_replaced_is_sent_again() {
    simulate_grouped(AnaGrouping::ByNamespace, HostLimits::default(), |server, disk, _| async move {
        let (_admin, cntlid) = Host::admin().await;
        let mut host = Host::io(cntlid, 1, 128).await;
        let write = blocks(nvm::WRITE, 3, 0, 256).with_sgl(Sgl::Transport { len: 128 << 10 });
        host.send(&capsule(&write, &[])).await;
        let asked = host.pdu().await.expect("R2T");
        subsystem(&server).reopen_namespace(NSID);
        soon(server.let_go(&subsystem(&server), NSID)).await.expect("nothing waits for the host");
        let begun = disk.begun.get();
        host.send(&h2c_data(3, asked.data_header().tag, 0, &[1; 128 << 10], true)).await;
        // A matter of the path: an invalid namespace would be an error of the request to the host.
        assert_eq!(host.pdu().await.expect("an answer").response(), (3, NvmeStatus::ANA_TRANSITION));
        assert_eq!(disk.begun.get(), begun, "nothing was written");
        host.send(&capsule(&Sqe::new(nvm::FLUSH, 4, NSID), &[])).await;
        assert!(host.pdu().await.expect("an answer").response().1.is_success());
    });
}

#[test]
fn a_withdrawn_namespace_is_let_go_of_as_soon_as_its_last_command_ends() {
    simulate(HostLimits::default(), |server, disk, _| async move {
        let (_admin, cntlid) = Host::admin().await;
        let mut host = Host::io(cntlid, 1, 128).await;
        disk.shut.set(true);
        host.send(&capsule(&Sqe::new(nvm::FLUSH, 3, NSID), &[])).await;
        while disk.waiting.get() == 0 {
            forebay_reactor::yield_now().await;
        }
        subsystem(&server).remove_namespace(NSID);
        let leaving = forebay_reactor::spawn({
            let server = server.clone();
            async move {
                server.let_go(&subsystem(&server), NSID).await;
                forebay_reactor::now()
            }
        });
        // Not a whole number of milliseconds, so that polling would notice the end later.
        forebay_reactor::sleep(Duration::from_micros(10_300)).await;
        assert!(!leaving.is_finished(), "the command is in flight");
        let ended = forebay_reactor::now();
        disk.open();
        let waited = leaving.await.as_nanos() - ended.as_nanos();
        assert!(waited < 200_000, "{waited} ns after the end of the command");
        assert!(host.pdu().await.expect("an answer").response().1.is_success());
        // No waiter is left behind, and an unused namespace is released at once.
        soon(server.let_go(&subsystem(&server), NSID)).await.expect("nothing to wait for");
    });
}

#[test]
fn a_fused_operation_that_fails_late_is_counted_and_in_the_error_log() {
    simulate(HostLimits::default(), |server, disk, _| async move {
        let (mut admin, cntlid) = Host::admin().await;
        let mut host = Host::io(cntlid, 1, 128).await;
        let mut tags = Vec::new();
        for (cid, opcode, fuse) in [(3, nvm::COMPARE, 1), (4, nvm::WRITE, 2)] {
            let mut half = blocks(opcode, cid, 0, 8).with_sgl(Sgl::Transport { len: 4096 });
            half.0[1] |= fuse;
            host.send(&capsule(&half, &[])).await;
        }
        for _ in 0..2 {
            let asked = host.pdu().await.expect("R2T");
            assert_eq!(asked.kind, kind::R2T);
            tags.push((asked.data_header().cid, asked.data_header().tag));
        }
        subsystem(&server).remove_namespace(NSID);
        soon(server.let_go(&subsystem(&server), NSID)).await.expect("nothing waits for the host");
        for (cid, tag) in tags {
            host.send(&h2c_data(cid, tag, 0, &[1; 4096], true)).await;
        }
        for (cid, status) in [(3, NvmeStatus::INVALID_NAMESPACE), (4, NvmeStatus::FUSED_FAILED)] {
            let answer = host.pdu().await.expect("an answer").response();
            assert_eq!((answer.0, answer.1.code()), (cid, status.code()));
        }
        assert_eq!(disk.begun.get(), 0, "nothing was compared or written");
        let connections = server.subsystems().stats().connections();
        let done = connections.iter().find(|each| each.queue == 1).expect("the I/O queue").done;
        assert_eq!((done.errors, done.commands[NvmeCommandKind::Write as usize]), (1, 1));
        forebay_reactor::sleep(Duration::from_millis(1)).await;
        let log = Sqe::new(admin_opcode::GET_LOG, 9, u32::MAX).with(10, 1 | 255 << 16);
        admin.send(&capsule(&log.with_sgl(Sgl::Transport { len: 1024 }), &[])).await;
        let page = admin.pdu().await.expect("the error log");
        assert_eq!(page.kind, kind::C2H_DATA);
        let entry = |at: usize| (u64_at(&page.data, at), u16_at(&page.data, at + 8), u16_at(&page.data, at + 10));
        assert_eq!((entry(0), entry(64).0), ((1, 1, 3), 0), "one entry: queue 1, the first half");
    });
}

#[test]
fn nothing_is_asked_for_that_is_not_wanted() {
    simulate(HostLimits::default(), |_, _, _| async move {
        let (mut admin, cntlid) = Host::admin().await;
        let mut host = Host::io(cntlid, 1, 128).await;
        let mut send = Sqe::new(FABRICS, 1, 0).with_sgl(Sgl::Transport { len: 64 << 10 });
        send.0[4] = fctype::AUTH_SEND;
        let unknown = Sqe::new(0x91, 2, 0).with_sgl(Sgl::Transport { len: 64 << 10 });
        for (io, sqe) in [(true, send), (false, send), (false, unknown)] {
            let queue = if io { &mut host } else { &mut admin };
            queue.send(&capsule(&sqe, &[])).await;
            let answer = queue.pdu().await.expect("an answer");
            assert_eq!(answer.kind, kind::RESPONSE, "the data is not asked for");
            assert!(!answer.response().1.is_success());
        }
    });
}

#[test]
fn verifying_stays_within_the_bytes_of_a_connection() {
    let limits = HostLimits { connection_bytes: 4 << 20, ..HostLimits::default() };
    simulate(limits, |_, disk, _| async move {
        const COUNT: u16 = 64;
        let (_admin, cntlid) = Host::admin().await;
        let mut host = Host::io(cntlid, 1, 128).await;
        disk.shut.set(true);
        for cid in 0..COUNT {
            host.send(&capsule(&blocks(nvm::VERIFY, cid, 0, 4096), &[])).await;
        }
        assert_eq!(soon(std::future::pending::<()>()).await, None);
        assert!(disk.reading.get() <= 4 << 20, "{} bytes are being read", disk.reading.get());
        disk.open();
        for _ in 0..COUNT {
            assert!(soon(host.pdu()).await.flatten().expect("an answer").response().1.is_success());
        }
    });
}

#[test]
fn a_write_of_the_past_is_over_before_the_host_is_back() {
    simulate(HostLimits::default(), |_, disk, _| async move {
        let (admin, cntlid) = Host::admin().await;
        let host = Host::io(cntlid, 1, 128).await;
        disk.shut.set(true);
        let write = blocks(nvm::WRITE, 3, 0, 8).with_sgl(Sgl::InCapsule { offset: 0, len: 4096 });
        host.send(&capsule(&write, &[1; 4096])).await;
        while disk.waiting.get() == 0 {
            forebay_reactor::yield_now().await;
        }
        host.stream.shutdown();
        admin.stream.shutdown();
        drop((host, admin));
        // Independent of the device's delay and the number of attempts.
        for _ in 0..10 {
            let mut again = Host::open().await;
            again.ask_queue(0, 32, forebay_nvmf::wire::fabrics::CNTLID_ANY).await;
            let answer = soon(again.pdu()).await.expect("an answer, or the end");
            assert!(answer.is_none_or(|answer| !answer.response().1.is_success()), "the old write is still under way");
        }
        disk.open();
        let (_admin, _) = Host::admin().await;
        assert_eq!(disk.waiting.get(), 0);
    });
}

#[test]
fn commands_for_a_volume_do_not_reach_the_next_that_gets_its_id() {
    simulate(HostLimits::default(), |server, disk, _| async move {
        let (mut admin, cntlid) = Host::admin().await;
        let mut host = Host::io(cntlid, 1, 128).await;
        let write = blocks(nvm::WRITE, 3, 0, 8).with_sgl(Sgl::InCapsule { offset: 0, len: 4096 });
        subsystem(&server).remove_namespace(NSID);
        server.let_go(&subsystem(&server), NSID).await;
        subsystem(&server).add_namespace(forebay_nvmf::Namespace { uuid: [8; 16], ..namespace() }).expect("in range");
        // The host does not know of the change yet, and means the former volume.
        for _ in 0..2 {
            host.send(&capsule(&write, &[1; 4096])).await;
            let status = host.pdu().await.expect("an answer").response().1;
            assert_eq!(status.code(), NvmeStatus::INVALID_NAMESPACE.code());
            assert_eq!(disk.begun.get(), 0, "nothing was written");
        }
        let what = Sqe::new(admin_opcode::IDENTIFY, 9, NSID).with(10, 3).with_sgl(Sgl::Transport { len: 4096 });
        admin.send(&capsule(&what, &[])).await;
        assert_eq!(admin.pdu().await.expect("what it is").kind, kind::C2H_DATA);
        host.send(&capsule(&write, &[1; 4096])).await;
        assert!(host.pdu().await.expect("an answer").response().1.is_success());
    });
}

#[test]
fn hosts_that_owe_data_do_not_keep_the_others_out() {
    let limits = HostLimits { core_bytes: 1 << 20, host_bytes: 1 << 20, ..HostLimits::default() };
    simulate(limits, |_, _, _| async move {
        let (_admin, cntlid) = Host::admin().await;
        let mut owing = Host::io(cntlid, 1, 128).await;
        let write = blocks(nvm::WRITE, 3, 0, 2048).with_sgl(Sgl::Transport { len: 1 << 20 });
        owing.send(&capsule(&write, &[])).await;
        assert_eq!(owing.pdu().await.expect("R2T").kind, kind::R2T);
        let name = "nqn.2014-08.org.nvmexpress:uuid:host-two";
        let (_admin, cntlid) = Host::admin_of(name).await;
        let mut host = Host::io_of(name, cntlid, 1, 128).await;
        for cid in 0..100 {
            let read = blocks(nvm::READ, cid, 0, 256).with_sgl(Sgl::Transport { len: 128 << 10 });
            host.send(&capsule(&read, &[])).await;
        }
        for _ in 0..100 {
            assert_eq!(soon(host.pdu()).await.flatten().expect("data").kind, kind::C2H_DATA);
            assert!(soon(host.pdu()).await.flatten().expect("an answer").response().1.is_success());
        }
    });
}

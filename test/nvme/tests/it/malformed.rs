//! Malformed requests: each ends at most its own connection, the host is told the reason, and the server continues.

use crate::common::*;
use forebay_nvme_host::client::Client;
use forebay_nvme_host::codec::{self, Digests, Pdu, blocks};
use forebay_nvmf::HostAccess;
use forebay_reactor::{Stream, random};

const NONE: Digests = Digests { header: false, data: false };
const BOTH: Digests = Digests { header: true, data: true };

/// Sends bytes on a fresh connection; returns the contents of the C2HTermReq.
async fn told(bytes: &[u8]) -> (u16, u32) {
    let mut client = Client::raw(Stream::connect(&addr()).await.expect("connected"));
    client.send(bytes).await.expect("sent");
    loop {
        match client.pdu().await {
            Ok(Some(Pdu::Term { status, information, header })) => {
                assert!(header.len() <= 128);
                return (status, information);
            }
            Ok(Some(_)) => {}
            other => panic!("{other:?} instead of a C2HTermReq"),
        }
    }
}

fn changed(mut bytes: Vec<u8>, at: usize, with: u8) -> Vec<u8> {
    bytes[at] = with;
    bytes
}

#[test]
fn every_error_of_the_transport_is_told() {
    simulate(4, |_, site| async move {
        site.add(1, &Model::new(1 << 20, false));
        let request = codec::ic_req(NONE, 0);
        let capsule = codec::command(&blocks(2, 1, 0, 1), &[], NONE);
        assert_eq!(told(&capsule).await, (2, 0), "a command before ICReq");
        assert_eq!(told(&changed(request.clone(), 0, 5)).await, (1, 0), "a PDU of a controller");
        assert_eq!(told(&changed(request.clone(), 0, 0xAA)).await, (1, 0), "no PDU at all");
        assert_eq!(told(&changed(request.clone(), 2, 64)).await, (1, 2), "another header length");
        assert_eq!(told(&changed(request.clone(), 5, 9)).await, (1, 4), "another length");
        assert_eq!(told(&changed(request.clone(), 8, 1)).await, (6, 8), "another version");
        let twice = [request.clone(), request.clone()].concat();
        assert_eq!(told(&twice).await, (2, 0), "ICReq twice");
        let long = [request.clone(), changed(capsule.clone(), 6, 0xFF)].concat();
        assert_eq!(told(&long).await, (1, 4), "a capsule too long");
        let data = codec::data(1, 0, 0, &[1; 512], true, NONE);
        assert_eq!(told(&[request.clone(), data].concat()).await, (2, 12), "data that nobody asked for");
        let digested = codec::command(&blocks(2, 1, 0, 1), &[], BOTH);
        let wrong = changed(digested, 73, 0x55);
        let (status, _) = told(&[codec::ic_req(BOTH, 0), wrong].concat()).await;
        assert_eq!(status, 3, "a wrong header digest");
        let undigested = [codec::ic_req(BOTH, 0), capsule].concat();
        assert_eq!(told(&undigested).await, (1, 1), "no header digest");
        until(|| site.subsystems.stats().counts().ended_for_cause == 11).await;
    });
}

#[test]
fn data_other_than_asked_for_ends_the_connection_and_damaged_data_the_command() {
    simulate(2, |_, site| async move {
        let model = Model::new(1 << 20, false);
        site.add(1, &model);
        for (offset, len, last, status) in [(512, 512, true, 4), (0, 65536 + 512, true, 4), (0, 512, true, 2)] {
            let (_admin, cntlid) = Client::admin(&addr(), NONE, NQN, HOST).await.expect("an admin queue");
            let mut io = Client::io(&addr(), NONE, NQN, HOST, cntlid, 1).await.expect("an I/O queue");
            let write = codec::with_data(blocks(1, 1, 0, 128), 65536, false);
            io.send(&codec::command(&write, &[], NONE)).await.expect("sent");
            let Ok(Some(Pdu::Ready { cid, tag, len: 65536, .. })) = io.pdu().await else { panic!("no R2T") };
            io.send(&codec::data(cid, tag, offset, &vec![1; len], last, NONE)).await.expect("sent");
            let Ok(Some(Pdu::Term { status: found, .. })) = io.pdu().await else { panic!("no C2HTermReq") };
            assert_eq!(found, status, "{offset} {len} {last}");
        }
        let (_admin, cntlid) = Client::admin(&addr(), BOTH, NQN, OTHER).await.expect("an admin queue");
        let mut io = Client::io(&addr(), BOTH, NQN, OTHER, cntlid, 1).await.expect("an I/O queue");
        let write = codec::with_data(blocks(1, 1, 0, 1), 512, true);
        let mut capsule = codec::command(&write, &[1; 512], BOTH);
        let end = capsule.len() - 1;
        capsule[end] ^= 1;
        io.send(&capsule).await.expect("sent");
        let Ok(Some(Pdu::Response(done))) = io.pdu().await else { panic!("no response") };
        assert_eq!((done.status, done.final_), (0x022, false), "it may be tried again");
        assert_eq!(model.bytes.borrow()[0], 0);
        io.run(blocks(1, 1, 0, 1), &[1; 512], 0).await.expect("write").ok();
        until(|| site.server.bytes_held() == 0).await;
    });
}

#[test]
fn sessions_with_any_byte_damaged_leave_nothing_behind() {
    // Each seed damages two hundred sessions.
    simulate(6, |_, site| async move {
        let model = Model::new(1 << 20, false);
        site.add(1, &model);
        let (connect, data) = codec::connect(0, 32, NQN, HOST, 0xFFFF, false);
        let connect = codec::command(&codec::with_data(connect, data.len(), true), &data, NONE);
        let enable = codec::command(&codec::property(0x14, false, Some(0x46_0001)), &[], NONE);
        let identify = codec::command(&codec::with_data(codec::with(codec::sqe(6, 0), 10, 1), 4096, false), &[], NONE);
        let whole = [codec::ic_req(NONE, 0), connect, enable, identify].concat();
        for _ in 0..200 {
            let mut bytes = whole.clone();
            for _ in 0..=random() % 3 {
                let at = random() as usize % bytes.len();
                bytes[at] = random() as u8;
            }
            bytes.truncate(bytes.len() - random() as usize % 64);
            let mut client = Client::raw(Stream::connect(&addr()).await.expect("connected"));
            client.send(&bytes).await.expect("sent");
            if random() & 1 == 0 {
                let _ = client.pdu().await;
            }
            client.close();
        }
        until(|| site.server.connections() == 0).await;
        assert_eq!((site.server.bytes_held(), site.subsystem.controller_ids().len()), (0, 0));
        let (mut admin, _) = Client::admin(&addr(), NONE, NQN, HOST).await.expect("the next one is served");
        admin.run(codec::with(codec::sqe(6, 0), 10, 1), &[], 4096).await.expect("identify").ok();
    });
}

#[test]
fn hosts_that_are_not_listed_are_refused() {
    simulate(2, |_, site| async move {
        site.add(1, &Model::new(1 << 20, false));
        site.subsystem.set_access(HostAccess::Listed([(HOST.to_owned(), None)].into()));
        let other = "nqn.2024-05.org.example:somebody-else";
        assert!(Client::admin(&addr(), NONE, NQN, other).await.is_err(), "not listed");
        let (_admin, cntlid) = Client::admin(&addr(), NONE, NQN, HOST).await.expect("an admin queue");
        assert!(Client::io(&addr(), NONE, NQN, other, cntlid, 1).await.is_err(), "another's controller");
        Client::io(&addr(), NONE, NQN, HOST, cntlid, 1).await.expect("an I/O queue");
    });
}

//! Exports to guests of one member's machine.

use std::cell::Cell;
use std::path::PathBuf;

use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, Buf, Error, ErrorKind, Extent, ExtentMap, Geometry, LocalFuture, SizeWatch,
};
use forebay_gateways::{GatewayState, GatewayVolume};
use forebay_reactor::sync::oneshot;

use super::super::guests::{GuestExports, check_socket, refuse_leaving};
use super::super::plan::plan_end;
use super::super::settings::MemberExport;
use super::*;
use crate::api::VhostSocketOptions;
use crate::engine::fronts::HostFront;

const OTHER: MemberId = MemberId([9; 16]);

fn request(image: &str, path: impl Into<PathBuf>) -> AttachRequest {
    AttachRequest { vhost: Some(VhostSocketOptions::new(path)), ..AttachRequest::new("rbd", image, Front::Vhost) }
}

fn settings_with(image: &str, guests: &[(MemberId, PathBuf)]) -> serde_json::Value {
    let guest = |(member, path): &(MemberId, PathBuf)| MemberExport { member: *member, export: request(image, path) };
    let member_exports = guests.iter().map(guest).collect();
    settings::write(&VolumeSettings { identity: identity(image), member_exports, ..VolumeSettings::default() })
}

impl World {
    fn socket(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

impl Member {
    /// Joins, with a front that creates sockets.
    async fn join_with_guests(&self) {
        self.engine.fronts.vhost().serve(&self.engine, &[]).await.expect("it serves");
        self.join().await;
    }

    async fn detach_guest(&self, image: &str, force: bool) -> crate::failure::Result<()> {
        let spec: ImageSpec = format!("rbd/{image}").parse().expect("a spec");
        self.group.clone().detach(self.engine.clone(), &spec, Front::Vhost, force).await
    }

    fn guests_in_record(&self, image: &str) -> Option<Vec<MemberId>> {
        let record = self.group.record()?;
        let entry = record.volume(&volume(image)).filter(|entry| !entry.leaving)?;
        let settings: VolumeSettings = settings::read(&entry.settings);
        Some(settings.member_exports.iter().map(|each| each.member).collect())
    }
}

#[test]
fn a_guest_has_a_socket_at_its_member_only() {
    run(async {
        let world = World::new(&["a"]).await;
        let member = world.start().await;
        member.join_with_guests().await;
        let (owner, socket, elsewhere) = (member.group.own, world.socket("a.sock"), world.socket("other.sock"));
        let settings = settings_with("a", &[(owner, socket.clone()), (OTHER, elsewhere.clone())]);
        let join = member.join_other(&MemberSettings { member_exports: true, ..MemberSettings::default() });
        world.change(&[join, GroupChange::AddVolume { volume: volume("a"), owner, settings }]).await;
        eventually("the record is read", || !member.group.settings.all().is_empty()).await;
        member.open("a").await;
        eventually("the guest's export", || member.published("a") == [Front::Vhost]).await;
        assert!(socket.exists() && !elsewhere.exists(), "the other socket is of another machine");
        let targets = member.engine.list_targets();
        let shown: Vec<_> = targets.iter().map(|each| (each.front, each.uri.clone(), each.error.is_none())).collect();
        let uri = format!("vhost-user-blk+unix://{}", socket.display());
        assert_eq!(shown, [(Front::Vhost, Some(uri), true)]);
        let status = member.engine.gateway_group_status(None).await.expect("a status");
        let sockets: Vec<_> = status.volumes[0].sockets.iter().map(|each| each.path.clone()).collect();
        assert_eq!(sockets, [socket.display().to_string(), elsewhere.display().to_string()]);
        assert!(status.volumes[0].fronts.is_empty());
        assert_eq!(member.group.socket_owner(&socket).map(|spec| spec.to_string()), Some("rbd/a".into()));
        assert_eq!(member.group.socket_owner(&elsewhere), None);

        // A member that must not serve hosts ends the guest's connection, and creates the socket again when it does.
        let host = MemberHost { group: member.group.clone() };
        host.admit_hosts(false);
        eventually("no guest", || member.published("a").is_empty() && !socket.exists()).await;
        host.admit_hosts(true);
        eventually("the guest's export again", || member.published("a") == [Front::Vhost] && socket.exists()).await;

        let failure = member.engine.leave_gateway_group().await.expect_err("the guest has no other path");
        assert_eq!(failure.kind, FailureKind::Busy);
        assert!(failure.message.contains("rbd/a") && failure.message.contains("guests"), "{failure}");
        member.kill().await;

        // As after a restart of the daemon.
        let member = world.start().await;
        member.join_with_guests().await;
        eventually("the record is read", || !member.group.settings.all().is_empty()).await;
        member.open("a").await;
        eventually("the guest's export after a restart", || member.published("a") == [Front::Vhost]).await;
        member.detach_guest("a", false).await.expect("no guest is connected");
        assert!(!socket.exists() && member.published("a").is_empty());
        assert_eq!(member.guests_in_record("a"), Some(vec![OTHER]), "the other member's export goes on");
        // It is no daemon, and was fenced meanwhile.
        let state = || member.group.record().and_then(|record| record.member(OTHER).map(|other| other.state));
        eventually("the other member is out", || matches!(state(), Some(GatewayState::Out(_)))).await;
        let failure = member.detach_guest("a", false).await.expect_err("it may come back");
        assert_eq!(failure.kind, FailureKind::NotFound, "{failure}");
        member.detach_guest("a", true).await.expect("nobody else ends it");
        eventually("the volume leaves the group", || member.guests_in_record("a").is_none()).await;
        member.kill().await;
    });
}

#[test]
fn a_socket_that_cannot_be_created_is_tried_again() {
    run(async {
        let world = World::new(&["a"]).await;
        let member = world.start().await;
        member.join_with_guests().await;
        let (owner, folder) = (member.group.own, world.socket("missing"));
        let socket = folder.join("a.sock");
        let settings = settings_with("a", &[(owner, socket.clone())]);
        world.change(&[GroupChange::AddVolume { volume: volume("a"), owner, settings }]).await;
        eventually("the record is read", || !member.group.settings.all().is_empty()).await;
        member.open("a").await;
        eventually("the failure", || member.group.exports.failure(&volume("a"), Front::Vhost).is_some()).await;
        let targets = member.engine.list_targets();
        let shown = targets[0].error.as_ref().expect("not served");
        assert!(shown.message.contains(&socket.display().to_string()), "{shown}");
        std::fs::create_dir(&folder).expect("a directory");
        eventually("the socket", || member.published("a") == [Front::Vhost] && socket.exists()).await;
        assert!(member.group.exports.failure(&volume("a"), Front::Vhost).is_none());
        member.detach_guest("a", false).await.expect("no guest is connected");
        eventually("the volume leaves the group", || member.guests_in_record("a").is_none()).await;
        member.kill().await;
    });
}

#[test]
fn members_that_do_not_know_such_exports_forbid_them() {
    run(async {
        let world = World::with_lease(60_000, &[]).await;
        let member = world.start().await;
        member.join().await;
        let wanted = request("a", world.socket("a.sock"));
        let check = async || {
            let record = member.group.record().expect("known");
            member.group.check_guest(&record, &wanted).await
        };
        check().await.expect("this version does");
        let join = member.join_other(&MemberSettings::default());
        world.change(&[join]).await;
        let members = || member.group.record().map_or(0, |record| record.members().len());
        eventually("the other member", || members() == 2).await;
        let failure = check().await.expect_err("an older version would remove the volume");
        assert_eq!(failure.kind, FailureKind::Unsupported, "{failure}");
        let owner = Some("no such user".to_owned());
        let wrong = VhostSocketOptions { owner, ..VhostSocketOptions::new(world.socket("a.sock")) };
        let wrong = AttachRequest { vhost: Some(wrong), ..wanted.clone() };
        let record = member.group.record().expect("known");
        let failure = member.group.check_guest(&record, &wrong).await.expect_err("no such user");
        assert!(failure.message.contains("no such user"), "{failure}");
        member.kill().await;
    });
}

/// Record of a group with these members, where `a` and `b` are exported to guests.
fn record(out: Option<u8>, guests: &[(u8, &str)]) -> GroupRecord {
    let identity = GroupIdentity::new(GatewayGroupId([3; 16]), GroupPolicy::default(), serde_json::Value::Null);
    let mut record = GroupRecord::created(identity, 1);
    for number in [1, 2] {
        let entry = GatewayMember {
            slot: number.into(),
            host: format!("gateway{number}"),
            ..GatewayMember::new(StartId([number; 16]))
        };
        record.apply(&[GroupChange::Join { member: MemberId([number; 16]), entry }]).expect("a member");
    }
    let guests: Vec<_> = guests.iter().map(|(member, path)| (MemberId([*member; 16]), PathBuf::from(path))).collect();
    let (owner, settings) = (MemberId([1; 16]), settings_with("a", &guests));
    record.apply(&[GroupChange::AddVolume { volume: volume("a"), owner, settings }]).expect("a volume");
    if let Some(number) = out {
        let (member, start, by) = (MemberId([number; 16]), StartId([number; 16]), MemberId([1; 16]));
        record.apply(&[GroupChange::BeginFencing { member, start, by }]).expect("fencing");
        record.apply(&[GroupChange::Fenced { member, start, by }]).expect("out");
        assert!(matches!(record.member(member).expect("a member").state, GatewayState::Out(_)));
    }
    record
}

fn left_after(record: &GroupRecord, own: u8, force: bool) -> crate::failure::Result<Option<Vec<MemberId>>> {
    let mut record = record.clone();
    record.apply(&plan_end(&record, &volume("a"), MemberId([own; 16]), Front::Vhost, force)?).expect("allowed");
    let stays = record.volume(&volume("a")).filter(|entry| !entry.leaving);
    let guests = |entry: &GatewayVolume| {
        let settings: VolumeSettings = settings::read(&entry.settings);
        settings.member_exports.iter().map(|each| each.member).collect()
    };
    Ok(stays.map(guests))
}

#[test]
fn each_member_ends_its_own_export() {
    let both = record(None, &[(1, "/run/a"), (2, "/run/a")]);
    assert_eq!(left_after(&both, 1, false), Ok(Some(vec![MemberId([2; 16])])));
    assert_eq!(left_after(&both, 2, true), Ok(Some(vec![MemberId([1; 16])])));
    let one = record(None, &[(2, "/run/a")]);
    assert_eq!(left_after(&one, 2, false), Ok(None), "the volume is removed with its last export");
    let failure = left_after(&one, 1, true).expect_err("the other member serves it");
    assert!(failure.message.contains("gateway2") && failure.kind == FailureKind::NotFound, "{failure}");
    assert!(!failure.to_string().contains("--force"), "{failure}");
    let failure = plan_end(&one, &volume("a"), MemberId([1; 16]), Front::Nbd, false).expect_err("not over nbd");
    assert!(!failure.message.contains("gateway2"), "{failure}");

    // Another member ends the export of one that is out, if it is told to.
    let lost = record(Some(2), &[(2, "/run/a")]);
    let failure = left_after(&lost, 1, false).expect_err("it may come back");
    assert!(failure.hint.as_ref().is_some_and(|hint| hint.contains("--force")), "{failure:?}");
    assert_eq!(left_after(&lost, 1, true), Ok(None));
    let left = record(None, &[(1, "/run/a"), (7, "/run/a")]);
    assert_eq!(left_after(&left, 1, false), Ok(None), "a member that has left has no exports");

    assert!(refuse_leaving(&both, MemberId([1; 16])).is_err() && refuse_leaving(&one, MemberId([1; 16])).is_ok());
    let check =
        |own: u8, name: &str, path: &str| check_socket(&both, &volume(name), MemberId([own; 16]), &request(name, path));
    assert!(check(1, "a", "/run/a").is_ok() && check(1, "b", "/run/b").is_ok() && check(3, "b", "/run/a").is_ok());
    let failure = check(1, "b", "/run/a").expect_err("it is a's");
    assert!(failure.message.contains("rbd/a") && failure.kind == FailureKind::Exists, "{failure}");
}

/// Device whose requests complete when the test says so.
#[derive(Default)]
struct Answered(RefCell<Vec<oneshot::Sender<forebay_block::Result<BlockReply>>>>);

impl BlockDevice for Answered {
    fn geometry(&self) -> Geometry {
        Geometry { size: 1 << 20, block_size: 512, preferred_io: 4096, transfer_max: 1 << 20, read_only: false }
    }

    fn submit(&self, _: BlockRequest) -> LocalFuture<forebay_block::Result<BlockReply>> {
        let (answer, answered) = oneshot::channel();
        self.0.borrow_mut().push(answer);
        Box::pin(async move { answered.await.expect("the test answers") })
    }

    fn map(&self, _: Extent) -> LocalFuture<forebay_block::Result<ExtentMap>> {
        unreachable!("guests do not ask")
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        None
    }
}

impl Answered {
    fn answer(&self, result: forebay_block::Result<BlockReply>) {
        self.0.borrow_mut().remove(0).send(result);
    }
}

#[test]
fn a_guest_does_not_see_that_its_member_was_fenced() {
    run(async {
        let (device, guests) = (Rc::new(Answered::default()), GuestExports::default());
        let volume = volume("a");
        let guest = guests.wrap(&volume, device.clone());
        let seen: Rc<RefCell<Vec<Option<ErrorKind>>>> = Rc::default();
        let submit = || {
            let (work, seen) = (guest.submit(BlockRequest::Read(Extent::new(0, 4096))), seen.clone());
            spawn(async move {
                let result = work.await.map_err(|error| error.kind()).err();
                seen.borrow_mut().push(result);
            })
        };
        let fenced = || Err(Error::new(ErrorKind::Fenced, "another start"));
        let read = || Ok(BlockReply::Data(Buf::copy_of(&[7; 4096]).into()));
        let turns = async || {
            for _ in 0..5 {
                forebay_reactor::yield_now().await;
            }
        };
        let first = [submit(), submit(), submit(), submit(), submit()];
        turns().await;
        device.answer(read());
        device.answer(Err(Error::new(ErrorKind::Io, "damaged")));
        device.answer(fenced());
        turns().await;
        let left = Some(ErrorKind::ShuttingDown);
        assert_eq!(*seen.borrow(), [None, Some(ErrorKind::Io), left], "a fenced request is left unanswered");

        // The connections end: the request stays for the guest's next device.
        let (told, ended) = (Rc::new(Cell::new(false)), oneshot::channel());
        let (own, taken) = (told.clone(), guests.take(&volume).expect("published"));
        let end = spawn(async move {
            let disconnect = async move {
                own.set(true);
                ended.1.await.expect("the test says so");
            };
            taken.end(disconnect).await;
        });
        turns().await;
        assert!(told.get());
        device.answer(fenced());
        turns().await;
        assert_eq!(seen.borrow()[3..], [left]);

        // The guest has the buffers of what completes later.
        ended.0.send(());
        end.await;
        device.answer(read());
        for one in first {
            one.await;
        }
        assert_eq!(seen.borrow()[4..], [left]);
        assert!(guests.take(&volume).is_none());
    });
}

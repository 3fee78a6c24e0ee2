//! Commands on an image whose log has replicas, at its primary and at a replica, with the primary alive and lost.
//!
//! Little is written back by itself here: writes stay in the log until a command or a takeover has to care for them.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::hosts::{Host, Hosts};
use super::{HOSTS, PATIENCE};
use crate::ceph::Cluster;
use crate::nbd::Client;
use crate::shell;

/// Image of these tests, in Forebay's and in Ceph's notation.
const IMAGE: &str = "rbd/commands";
const NAME: &str = "commands";
const MIB: u64 = 1 << 20;
const KIB: u64 = 1 << 10;
/// Port of each daemon's iSCSI target.
pub const ISCSI_PORT: u16 = 3260;

/// Runs all of them, beginning at the present primary.
pub fn run(hosts: &mut Hosts, cluster: &Cluster, folder: PathBuf) -> Result<()> {
    let mut image = LoggedImage::create(hosts, cluster, folder)?;
    type Step = (&'static str, fn(&mut LoggedImage<'_>) -> Result<()>);
    let steps: [Step; 8] = [
        ("refusals while the primary is alive", refusals),
        ("resizes", resizes),
        ("discards and zeroes", zeroes),
        ("snapshots", snapshots),
        ("events of copies", copies),
        ("reservations", reservations),
        ("renames, and takeovers by the daemon itself", renames),
        ("discards of the log", log_discards),
    ];
    for (name, step) in steps {
        step(&mut image).with_context(|| format!("{name}, primary host {}", image.hosts.primary))?;
        println!("ok {name}");
    }
    Ok(())
}

/// Image with a log that has replicas, and what it must hold.
struct LoggedImage<'a> {
    hosts: &'a mut Hosts,
    cluster: &'a Cluster,
    folder: PathBuf,
    content: Vec<u8>,
    writes: u8,
}

impl<'a> LoggedImage<'a> {
    /// Creates the image, and serves it at the primary.
    fn create(hosts: &'a mut Hosts, cluster: &'a Cluster, folder: PathBuf) -> Result<Self> {
        let content = vec![0; 8 << 20];
        let image = Self { hosts, cluster, folder, content, writes: 0 };
        image.host().command(&["create", IMAGE, "--size", "8M"])?;
        image.attach_with("")?;
        image.hosts.complete(IMAGE, HOSTS)?;
        Ok(image)
    }

    /// Attaches it at the primary with a log that has these options, and copies at both others.
    fn attach_with(&self, options: &str) -> Result<()> {
        let host = self.host();
        let place = format!("--log=ssd:{}:16M:age=60m{options}", host.folder.join("logs").display());
        let others = self.hosts.all.iter().filter(|other| other.address != host.address);
        let replicas: Vec<String> = others.map(|other| format!("--replica={}", other.address)).collect();
        let mut command = vec!["attach", IMAGE, "--nbd", &place];
        command.extend(replicas.iter().map(String::as_str));
        host.command(&command).map(drop)
    }

    /// Returns the host that serves it.
    fn host(&self) -> &Host {
        self.hosts.primary()
    }

    /// Returns a host that has a copy only, `step` after the primary.
    fn replica(&self, step: usize) -> usize {
        (self.hosts.primary + step) % HOSTS
    }

    fn client(&self) -> Result<Client> {
        Client::connect(&self.host().daemon().socket(), IMAGE)
    }

    /// Writes new content, and waits until it is acknowledged.
    fn write(&mut self, offset: u64, length: u64) -> Result<()> {
        self.writes = self.writes.wrapping_add(1).max(1);
        let data = vec![self.writes; length as usize];
        let mut client = self.client()?;
        client.write(offset, &data, false)?;
        acknowledged(&mut client)?;
        self.content[offset as usize..(offset + length) as usize].copy_from_slice(&data);
        Ok(())
    }

    /// Reads everything back, over NBD.
    fn verify(&self) -> Result<()> {
        let mut client = self.client()?;
        ensure!(client.size() == self.content.len() as u64, "it has {} bytes", client.size());
        let mut found = Vec::new();
        while found.len() < self.content.len() {
            client.read(found.len() as u64, MIB as usize)?;
            let answer = client.answer()?;
            ensure!(answer.error == 0, "a read fails with error {}", answer.error);
            found.extend(answer.data);
        }
        same(&found, &self.content)
    }

    /// Describes the log as a host sees it.
    fn info(&self, host: usize) -> Result<Value> {
        let text = self.hosts.all[host].command(&["--format", "json", "log", "info", IMAGE])?;
        Ok(serde_json::from_str(&text)?)
    }

    /// Kills the primary.
    fn lose(&mut self) -> Result<()> {
        let host = &mut self.hosts.all[self.hosts.primary];
        host.crashed = Some(host.daemon.take().context("its daemon runs")?.crash()?);
        Ok(())
    }

    /// Takes the log over at another host, which serves the image then, and verifies everything.
    fn take_over(&mut self, to: usize) -> Result<()> {
        let host = &self.hosts.all[to];
        host.until(&["log", "takeover", IMAGE])?;
        host.until(&["attach", IMAGE, "--nbd"])?;
        self.hosts.primary = to;
        self.verify().context("after the takeover")
    }

    /// Starts a former primary again, which becomes a replica.
    fn bring_back(&mut self, number: usize) -> Result<()> {
        let host = &mut self.hosts.all[number];
        host.daemon = Some(host.crashed.take().context("it was killed")?.restart()?);
        host.until(&["detach", IMAGE, "--nbd", "--keep-log", "--force"])?;
        self.hosts.complete(IMAGE, HOSTS)
    }

    /// Kills the primary, takes the log over at the next host, and brings the former primary back.
    fn fail_over(&mut self) -> Result<()> {
        let (former, next) = (self.hosts.primary, self.replica(1));
        self.lose()?;
        self.take_over(next)?;
        self.bring_back(former)
    }

    /// Expects that a command fails at a host, and that it says all of this.
    fn refused(&self, host: usize, arguments: &[&str], says: &[&str]) -> Result<()> {
        let answer = self.hosts.all[host].command(arguments);
        let text = answer.err().map(|error| format!("{error:#}"));
        let text = text.with_context(|| format!("{arguments:?} at host {host} was not refused"))?;
        for word in says {
            ensure!(text.contains(word), "{arguments:?} at host {host}: {text:?} lacks {word:?}");
        }
        Ok(())
    }

    /// Runs Ceph's own client.
    fn rbd(&self, arguments: &[&str]) -> Result<String> {
        shell::output(self.cluster.command("timeout").args(["60", "rbd"]).args(arguments))
    }

    /// Returns what the cluster has of the image or of a snapshot.
    fn exported(&self, name: &str) -> Result<Vec<u8>> {
        let path = self.folder.join("exported");
        let _ = std::fs::remove_file(&path);
        self.rbd(&["export", "--no-progress", name, &path.display().to_string()])?;
        Ok(std::fs::read(&path)?)
    }
}

fn acknowledged(client: &mut Client) -> Result<()> {
    let answer = client.answer()?;
    ensure!(answer.error == 0, "a request fails with error {}", answer.error);
    Ok(())
}

fn same(found: &[u8], expected: &[u8]) -> Result<()> {
    ensure!(found.len() == expected.len(), "{} bytes instead of {}", found.len(), expected.len());
    let at = found.iter().zip(expected).position(|(one, other)| one != other);
    ensure!(at.is_none(), "it differs at {at:?}: {:?}", at.map(|at| (found[at], expected[at])));
    Ok(())
}

/// Refuses at a replica, and at the primary, whatever would lose or hide writes; tells what the log holds.
fn refusals(image: &mut LoggedImage<'_>) -> Result<()> {
    let (primary, replica) = (image.hosts.primary, image.replica(1));
    image.write(MIB, 64 * KIB)?;
    let at_primary = image.info(primary)?;
    ensure!(at_primary["state"] == "on" && at_primary["dirty_bytes"] == 64 * KIB, "at the primary: {at_primary}");
    ensure!(at_primary["dirty_since_ms"].is_u64() && at_primary["copies_wanted"] == HOSTS, "{at_primary}");
    let policy = serde_json::json!({ "takeover": "manual", "lease_ms": 500, "min_replicas": 0 });
    ensure!(at_primary["policy"] == policy, "{at_primary}");
    let text = image.host().command(&["log", "info", IMAGE])?;
    ensure!(text.contains("policy: takeover=manual, lease=500ms, min-replicas=0"), "{text}");
    let at_replica = image.info(replica)?;
    ensure!(at_replica["state"] == "replica" && at_replica["dirty_bytes"] == 64 * KIB, "at a replica: {at_replica}");
    ensure!(at_replica["members"].as_array().is_some_and(|all| all.len() == HOSTS), "{at_replica}");
    ensure!(at_replica["policy"] == policy, "{at_replica}");
    for (host, state) in [(primary, "on"), (replica, "replica")] {
        let text = image.hosts.all[host].command(&["--format", "json", "log", "ls"])?;
        let logs: Vec<Value> = serde_json::from_str(&text)?;
        let found: Vec<&Value> = logs.iter().filter(|log| log["image"] == IMAGE).collect();
        ensure!(found.len() == 1 && found[0]["state"] == state, "log ls at host {host}: {text}");
    }
    let loss = ["64 KiB in ", ", the oldest written ", " ago ("];
    let with = |more: &[&'static str]| [&loss[..], more].concat();
    image.refused(primary, &["log", "discard", IMAGE], &["in use", "forebay detach"])?;
    image.refused(primary, &["log", "discard", IMAGE, "--force"], &["in use"])?;
    image.refused(primary, &["rm", IMAGE], &with(&["has a write log"]))?;
    image.refused(replica, &["log", "discard", IMAGE], &with(&["belongs to another daemon", "--force"]))?;
    image.refused(replica, &["log", "discard", IMAGE, "--force"], &["has not closed it", "forebay detach"])?;
    image.refused(replica, &["rm", IMAGE], &with(&["has a write log", "forebay detach"]))?;
    image.refused(replica, &["log", "takeover", IMAGE], &["is alive and connected", "--keep-log"])?;
    for command in [
        &["log", "flush", IMAGE][..],
        &["resize", IMAGE, "--size", "9M"],
        &["attach", IMAGE, "--nbd"],
        &["export", IMAGE, "/dev/null"],
    ] {
        image.refused(replica, command, &["is served by peer", "forebay log takeover"])?;
    }
    // The primary makes a snapshot for another client, which has what the log has; what needs the lock is refused.
    image.rbd(&["snap", "create", "--no-progress", "rbd/commands@asked"])?;
    same(&image.exported("rbd/commands@asked")?, &image.content).context("a snapshot that rbd has asked for")?;
    let rbd = image.rbd(&["snap", "rollback", "--no-progress", "rbd/commands@asked"]);
    let said = rbd.err().map(|error| format!("{error:#}")).context("Ceph's client wrote past the log")?;
    ensure!(said.contains("Read-only file system"), "{said}");
    image.rbd(&["snap", "rm", "--no-progress", "rbd/commands@asked"])?;
    let flushed = image.host().command(&["--format", "json", "log", "flush", IMAGE])?;
    let flushed: Value = serde_json::from_str(&flushed)?;
    ensure!(flushed["dirty_entries"] == 0 && flushed["state"] == "on", "{flushed}");
    same(&image.exported(IMAGE)?, &image.content).context("what was flushed is in the cluster")?;
    image.verify()
}

/// Resizes with dirty data in the log, then loses the primary.
fn resizes(image: &mut LoggedImage<'_>) -> Result<()> {
    image.write(0, 4 * KIB)?;
    image.write(7 * MIB, MIB)?;
    let resize = |image: &mut LoggedImage<'_>, size: u64| {
        let text = format!("{}M", size / MIB);
        image.host().command(&["resize", IMAGE, "--size", &text, "--allow-shrink"])?;
        image.content.resize(size as usize, 0);
        image.verify().with_context(|| format!("resized to {text}"))
    };
    resize(image, 12 * MIB)?;
    image.write(11 * MIB, 64 * KIB)?;
    image.write(5 * MIB, 64 * KIB)?;
    resize(image, 6 * MIB)?;
    image.write(6 * MIB - 4 * KIB, 4 * KIB)?;
    // What was cut off must not be there when it grows again, at a later primary either.
    resize(image, 10 * MIB)?;
    image.write(9 * MIB, 4 * KIB)?;
    let (former, next) = (image.hosts.primary, image.replica(1));
    image.lose()?;
    let info = image.info(next)?;
    ensure!(info["state"] == "replica" && info["dirty_entries"].as_u64() > Some(0), "the primary is dead: {info}");
    image.refused(next, &["log", "flush", IMAGE], &["forebay log takeover"])?;
    let lost = &["belongs to another daemon", " in ", ", the oldest written ", "--flush-only", "--force"];
    image.refused(next, &["log", "discard", IMAGE], lost)?;
    image.refused(next, &["rm", IMAGE], &["has a write log", ", the oldest written ", "--flush-only"])?;
    image.take_over(next)?;
    let info = image.info(next)?;
    let takeover = &info["last_takeover"];
    let by_whom = image.hosts.all[next].command(&["log", "info", IMAGE])?;
    ensure!(takeover["from"].is_string() && takeover["automatic"] == false, "{info}");
    ensure!(takeover["duration_ms"].is_u64() && by_whom.contains("taken over: "), "{by_whom}");
    image.bring_back(former)?;
    image.host().command(&["resize", IMAGE, "--size", "8M", "--allow-shrink"])?;
    image.content.truncate(8 << 20);
    image.write(8 * MIB - 64 * KIB, 64 * KIB)?;
    image.fail_over()?;
    image.host().command(&["log", "flush", IMAGE])?;
    same(&image.exported(IMAGE)?, &image.content).context("in the cluster")
}

/// Discards and writes zeroes over what the image and the log hold, then loses the primary.
fn zeroes(image: &mut LoggedImage<'_>) -> Result<()> {
    image.write(0, 4 * MIB)?;
    image.host().command(&["log", "flush", IMAGE])?;
    image.write(4 * MIB, 2 * MIB)?;
    for (from, length, discards) in [
        (64 * KIB, 64 * KIB, true),
        (512 * KIB, 4 * KIB, false),
        (3 * MIB, 2 * MIB, true),
        (5 * MIB + 4 * KIB, 128 * KIB, false),
    ] {
        let mut client = image.client()?;
        match discards {
            true => client.discard(from, length as usize)?,
            false => client.write_zeroes(from, length as usize)?,
        };
        acknowledged(&mut client)?;
        image.content[from as usize..(from + length) as usize].fill(0);
    }
    image.write(3 * MIB + 4 * KIB, 4 * KIB)?;
    image.verify()?;
    image.fail_over()?;
    image.host().command(&["log", "flush", IMAGE])?;
    image.verify()?;
    same(&image.exported(IMAGE)?, &image.content).context("in the cluster")
}

/// Lets Ceph's client make snapshots while the log is kept, and takes the log over: they keep what they had.
fn snapshots(image: &mut LoggedImage<'_>) -> Result<()> {
    image.write(0, 64 * KIB)?;
    image.host().command(&["log", "flush", IMAGE])?;
    let flushed = image.content.clone();
    // Each of them overwrites the one before in part: whatever was written back is a point in their order.
    let mut points = vec![flushed];
    for step in 0..8 {
        image.write(MIB + step * 4 * KIB, 8 * KIB)?;
        points.push(image.content.clone());
    }
    let (former, next) = (image.hosts.primary, image.replica(1));
    image.host().until(&["detach", IMAGE, "--nbd", "--keep-log", "--force"])?;
    image.rbd(&["snap", "create", "--no-progress", "rbd/commands@one"])?;
    let one = image.exported("rbd/commands@one")?;
    ensure!(points.contains(&one), "the snapshot has no point in the order of the writes after the flush");
    image.take_over(next)?;
    ensure!(image.hosts.primary != former, "another host has it");
    image.write(0, 8 * KIB)?;
    image.host().command(&["log", "flush", IMAGE])?;
    same(&image.exported("rbd/commands@one")?, &one).context("the snapshot has changed since")?;
    let two = image.content.clone();
    image.host().until(&["detach", IMAGE, "--nbd", "--keep-log", "--force"])?;
    image.rbd(&["snap", "create", "--no-progress", "rbd/commands@two"])?;
    image.host().until(&["attach", IMAGE, "--nbd"])?;
    image.write(0, MIB)?;
    image.hosts.complete(IMAGE, HOSTS)?;
    image.fail_over()?;
    image.host().command(&["log", "flush", IMAGE])?;
    same(&image.exported("rbd/commands@two")?, &two).context("a snapshot after a takeover")?;
    same(&image.exported("rbd/commands@one")?, &one).context("the first snapshot")?;
    same(&image.exported(IMAGE)?, &image.content).context("in the cluster")
}

/// Loses a replica: the primary logs that once, and its return; with `min-replicas` writes wait, which `log info` shows.
fn copies(image: &mut LoggedImage<'_>) -> Result<()> {
    image.attach_with(":min-replicas=2")?;
    let (primary, replica) = (image.hosts.primary, image.replica(1));
    let count = |image: &LoggedImage<'_>, text: &str| image.host().daemon().log().matches(text).count();
    let texts = [
        "fewer complete copies than wanted: 2 of 3",
        "has all wanted copies again",
        "not acknowledged",
        "acknowledged again",
    ];
    let before = texts.map(|text| count(image, text));
    let host = &mut image.hosts.all[replica];
    host.crashed = Some(host.daemon.take().context("its daemon runs")?.crash()?);
    let mut client = image.client()?;
    client.write(0, &[7; 4096], false)?;
    let mut last = Value::Null;
    let waits = || {
        last = image.info(primary).ok()?;
        last["reason"]
            .as_str()?
            .contains("writes wait: 2 copies are complete, and min-replicas=2 needs 3")
            .then_some(())
    };
    shell::wait_for(PATIENCE, waits).with_context(|| format!("writes wait: {last}"))?;
    let text = image.host().command(&["log", "info", IMAGE])?;
    ensure!(text.contains("copies: 2 of 3") && text.contains("why:    writes wait"), "{text}");
    let host = &mut image.hosts.all[replica];
    host.daemon = Some(host.crashed.take().context("it was killed")?.restart()?);
    acknowledged(&mut client).context("the write that waited")?;
    image.content[..4096].fill(7);
    image.hosts.complete(IMAGE, HOSTS)?;
    let told = || (texts.map(|text| count(image, text)) == before.map(|count| count + 1)).then_some(());
    shell::wait_for(PATIENCE, told).with_context(|| {
        format!("each once: {texts:?}, {:?} after {before:?}", texts.map(|text| count(image, text)))
    })?;
    ensure!(image.info(primary)?["reason"].is_null(), "writes do not wait any more");
    // What is not named stays as it is.
    image.attach_with("")?;
    ensure!(image.info(primary)?["policy"]["min_replicas"] == 2, "another policy: {}", image.info(primary)?);
    image.attach_with(":min-replicas=0")?;
    image.verify()
}

/// Reserves the image over iSCSI, then loses the primary: the reservation holds at the next one.
fn reservations(image: &mut LoggedImage<'_>) -> Result<()> {
    const HOLDER: &str = "iqn.2026-11.io.forebay:holder";
    const OTHER: &str = "iqn.2026-11.io.forebay:other";
    const WRITE: &str = "2a000000000000000800:out=55x4096";
    let attach = |image: &LoggedImage<'_>| -> Result<String> {
        let text = image.host().until(&["attach", IMAGE, "--iscsi"])?;
        Ok(text.lines().map(str::trim).find(|line| line.starts_with("iscsi")).context("no URI")?.to_owned())
    };
    let say = |uri: &str, initiator: &str, commands: &[&str]| -> Result<Vec<String>> {
        let mut say = shell::command(shell::target().join("release/iscsi-say"));
        say.args(["--initiator", initiator, uri]).args(commands);
        Ok(shell::output(&mut say)?.lines().map(|line| line[..2].to_owned()).collect())
    };
    let uri = attach(image)?;
    let (key, none) = ("00000000000012ab", "0000000000000000");
    let rest = "0000000001000000";
    let register = format!("5f000000000000001800:out={none}{key}{rest}");
    let reserve = format!("5f010100000000001800:out={key}{none}{rest}");
    ensure!(say(&uri, HOLDER, &[&register, &reserve, WRITE])? == ["00", "00", "00"], "registered and reserved");
    image.content[..4096].fill(0x55);
    ensure!(say(&uri, OTHER, &[WRITE])? == ["18"], "another host's write must conflict");
    let held = image.host().command(&["reservations", "ls", IMAGE])?;
    ensure!(held.contains(HOLDER), "{held}");
    let (former, next) = (image.hosts.primary, image.replica(1));
    image.lose()?;
    image.hosts.all[next].until(&["log", "takeover", IMAGE])?;
    image.hosts.primary = next;
    let uri = attach(image)?;
    let now = image.host().command(&["reservations", "ls", IMAGE])?;
    ensure!(now.contains(HOLDER), "after the takeover: {now}");
    ensure!(say(&uri, OTHER, &[WRITE])? == ["18"], "another host's write must conflict after the takeover, too");
    image.host().command(&["reservations", "clear", IMAGE])?;
    ensure!(say(&uri, OTHER, &[WRITE])? == ["00"], "the reservation is cleared");
    image.host().until(&["attach", IMAGE, "--nbd"])?;
    image.host().until(&["detach", IMAGE, "--iscsi", "--force"])?;
    image.verify()?;
    let host = &mut image.hosts.all[former];
    host.daemon = Some(host.crashed.take().context("it was killed")?.restart()?);
    host.until(&["detach", IMAGE, "--iscsi", "--keep-log", "--force"])?;
    host.until(&["detach", IMAGE, "--nbd", "--keep-log", "--force"])?;
    image.hosts.complete(IMAGE, HOSTS)
}

/// Renames the image while its log is kept, then loses the primary: a replica takes over by itself.
fn renames(image: &mut LoggedImage<'_>) -> Result<()> {
    const OTHER: &str = "rbd/renamed";
    image.attach_with(":takeover=auto")?;
    image.write(MIB, 64 * KIB)?;
    image.host().until(&["detach", IMAGE, "--nbd", "--keep-log", "--force"])?;
    image.host().command(&["mv", IMAGE, OTHER])?;
    image.host().command(&["attach", OTHER, "--nbd"])?;
    image.hosts.complete(OTHER, HOSTS)?;
    let former = image.hosts.primary;
    image.lose()?;
    let others: Vec<usize> = (0..HOSTS).filter(|host| *host != former).collect();
    let taken = |host: usize| -> Option<Value> {
        let text = image.hosts.all[host].command(&["--format", "json", "log", "info", OTHER]).ok()?;
        let info: Value = serde_json::from_str(&text).ok()?;
        (info["last_takeover"]["automatic"] == true).then_some(info)
    };
    let next = shell::wait_for(PATIENCE, || others.iter().copied().find(|host| taken(*host).is_some()));
    let next = next.with_context(|| {
        let tails = others.iter().map(|host| image.hosts.all[*host].daemon().log_tail());
        format!("no replica takes over:\n{}", tails.collect::<Vec<_>>().join("\n"))
    })?;
    image.hosts.primary = next;
    let host = &mut image.hosts.all[former];
    host.daemon = Some(host.crashed.take().context("it was killed")?.restart()?);
    host.until(&["detach", OTHER, "--nbd", "--keep-log", "--force"])?;
    image.hosts.complete(OTHER, HOSTS)?;
    image.host().command(&["log", "flush", OTHER])?;
    image.host().until(&["attach", OTHER, "--nbd"])?;
    image.host().until(&["detach", OTHER, "--nbd", "--keep-log", "--force"])?;
    image.host().command(&["mv", OTHER, IMAGE])?;
    image.attach_with(":takeover=manual")?;
    image.hosts.complete(IMAGE, HOSTS)?;
    image.verify()
}

/// Discards a log with writes that are nowhere else, when told to twice: the image has what was written back before.
fn log_discards(image: &mut LoggedImage<'_>) -> Result<()> {
    image.host().command(&["log", "flush", IMAGE])?;
    let flushed = image.content.clone();
    image.write(2 * MIB, 64 * KIB)?;
    let (former, next) = (image.hosts.primary, image.replica(1));
    image.lose()?;
    let loss = ["64 KiB in ", ", the oldest written ", "--force"];
    image.refused(next, &["log", "discard", IMAGE], &loss)?;
    // Not even with force, as long as another daemon may have the image's lock: it would wait, and discard the log later.
    let taken_first = ["has not closed it", "forebay log takeover"];
    image.refused(next, &["log", "discard", IMAGE, "--force"], &taken_first)?;
    image.take_over(next)?;
    image.refused(next, &["log", "discard", IMAGE], &["in use"])?;
    image.host().until(&["detach", IMAGE, "--nbd", "--keep-log", "--force"])?;
    image.refused(next, &["log", "discard", IMAGE], &loss)?;
    image.refused(next, &["rm", IMAGE], &["64 KiB in ", ", the oldest written "])?;
    image.host().command(&["log", "discard", IMAGE, "--force"])?;
    image.refused(next, &["log", "info", IMAGE], &["has no write log"])?;
    same(&image.exported(IMAGE)?, &flushed).context("what was flushed is in the cluster")?;
    let host = &mut image.hosts.all[former];
    host.daemon = Some(host.crashed.take().context("it was killed")?.restart()?);
    host.until(&["detach", IMAGE, "--nbd", "--force"])?;
    for snapshot in ["one", "two"] {
        image.rbd(&["snap", "rm", "--no-progress", &format!("rbd/{NAME}@{snapshot}")])?;
    }
    image.host().until(&["rm", IMAGE])?;
    Ok(())
}

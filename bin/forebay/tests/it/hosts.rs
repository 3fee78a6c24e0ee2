//! Hosts of a daemon under test: NVMe hosts and iSCSI initiators, and the files of their secrets.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use forebay_nvme_host::client::Client as NvmeHost;
use forebay_nvme_host::codec::Digests;
use forebay_reactor::{Addr, DriverChoice, Reactor};

use crate::common::Site;

pub const FRONTS: [&str; 4] = ["--nvme", "127.0.0.1:0", "--iscsi", "127.0.0.1:0"];
pub const PLAIN: Digests = Digests { header: false, data: false };
pub const DISKS: &str = "nqn.2024-05.org.example:disks";
pub const ALICE: &str = "nqn.2024-05.org.example:alice";
pub const BOB: &str = "nqn.2024-05.org.example:bob";
pub const TARGET: &str = "iqn.2024-05.org.example:disks";
pub const CAROL: &str = "iqn.2024-05.org.example:carol";
pub const DAVE: &str = "iqn.2024-05.org.example:dave";
pub const SECRET: &str = "DHHC-1:00:IwtNfQh/g40PNAxa3nbIYCHkRcC/ZQqHegC7NP5ynMfj9HeR:\n";

/// Runs hosts to their end.
pub fn on_reactor<T>(work: impl Future<Output = T>) -> T {
    Reactor::system(DriverChoice::Auto).expect("a reactor").block_on(work)
}

/// Returns the address that a front listens on.
pub fn address(site: &Site, front: &str) -> Addr {
    site.json(&["status"])[front][0].as_str().expect("an address").parse().expect("an address")
}

/// Writes a file that only its owner may read.
pub fn file(site: &Site, name: &str, text: &str) -> PathBuf {
    let path = site.path(name);
    fs::write(&path, text).expect("written");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("its mode");
    path
}

/// Connects the admin queue and an I/O queue of a host.
pub async fn connect(addr: &Addr, nqn: &str, host: &str) -> std::io::Result<(NvmeHost, NvmeHost)> {
    let (admin, cntlid) = NvmeHost::admin(addr, PLAIN, nqn, host).await?;
    let io = NvmeHost::io(addr, PLAIN, nqn, host, cntlid, 1).await?;
    Ok((admin, io))
}

/// Answer of an NVMe subsystem to a host that connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    Refused,
    /// Its name is enough.
    ByName,
    /// Authentication required.
    Asked,
}

/// Connects the admin queue of a host without authenticating it.
pub fn admission(addr: &Addr, nqn: &str, host: &str) -> Admission {
    on_reactor(async {
        let mut connection = NvmeHost::connect(addr, PLAIN).await.expect("connected");
        let done = connection.connect_queue(0, 32, nqn, host, 0xFFFF, true).await.expect("answered").completion;
        match (done.status, done.result >> 16) {
            (0, 0) => Admission::ByName,
            (0, _) => Admission::Asked,
            _ => Admission::Refused,
        }
    })
}

//! Records in a pool, and members that share one: the real store and runner on the model of a cluster.

mod members;
mod record;

use std::future::Future;
use std::time::Duration;

use forebay_gateways::{GatewayGroupId, GatewayMember, GroupIdentity, GroupPolicy, MemberId, StartId};
use forebay_reactor::{DriverChoice, Reactor, sleep, timeout};

/// Runs a test on a reactor of the operating system.
fn run<T>(future: impl Future<Output = T>) -> T {
    Reactor::system(DriverChoice::Auto).expect("a reactor").block_on(future)
}

/// Waits until something is so.
async fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let so = async {
        while !is_so() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(timeout(Duration::from_secs(60), so).await.is_ok(), "not within a minute: {what}");
}

fn identity() -> GroupIdentity {
    let policy = GroupPolicy { lease_ms: 1000, ..GroupPolicy::default() };
    GroupIdentity::new(GatewayGroupId([3; 16]), policy, serde_json::json!({"nqn": "nqn.2026-01.test"}))
}

fn member(number: u8) -> MemberId {
    MemberId([number; 16])
}

fn entry(slot: u16, start: u8, client: String) -> GatewayMember {
    GatewayMember {
        slot,
        host: format!("gateway{slot}"),
        version: "0.1.0".into(),
        clients: vec![client],
        ..GatewayMember::new(StartId([start; 16]))
    }
}

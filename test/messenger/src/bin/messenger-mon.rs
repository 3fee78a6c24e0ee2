//! Completes the handshake with a Ceph monitor and requests its monitor map.
//!
//! `messenger-mon ADDR ID KEY crc|secure`: prints what it got and ends with 0; with 1 and the reason when refused.

use std::cell::RefCell;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use forebay_messenger::session::cephx::{CephxSecret, TicketStore};
use forebay_messenger::wire::control::mode;
use forebay_messenger::wire::entity;
use forebay_messenger::{Address, Auth, Connection, Message, Messenger, MessengerCore, MessengerOptions, Policy};
use forebay_reactor::sync::Notify;
use forebay_reactor::{DriverChoice, Reactor, timeout};

/// `CEPH_MSG_MON_MAP` and `CEPH_MSG_MON_GET_MAP`.
const MON_MAP: u16 = 4;
const MON_GET_MAP: u16 = 5;

async fn ask(words: &[String]) -> Result<String, String> {
    let [address, id, key, picked] = words else { return Err("usage: messenger-mon ADDR ID KEY crc|secure".into()) };
    let picked = match picked.as_str() {
        "crc" => mode::CRC,
        "secure" => mode::SECURE,
        other => return Err(format!("{other} is no mode")),
    };
    let secret = CephxSecret::from_base64(key).ok_or("this is no key of a keyring")?;
    let address: Address = address.parse().map_err(|error: forebay_reactor::net::AddrError| error.to_string())?;
    let options = MessengerOptions {
        entity: entity::CLIENT,
        peer_entity: Some(entity::MON),
        auth: Auth::Cephx { id: id.clone(), secret, services: entity::MON.into(), ticket_store: TicketStore::new() },
        modes: Some(vec![picked]),
        ..MessengerOptions::default()
    };
    let map = Rc::new(RefCell::new(None));
    let came = Rc::new(Notify::new());
    let (found, notify) = (map.clone(), came.clone());
    let handler = move |_: &Connection, message: Message| {
        if message.kind == MON_MAP {
            *found.borrow_mut() = Some(message.len());
            notify.notify_all();
        }
    };
    let messenger = Messenger::new(&MessengerCore::default(), options, handler);
    let connection = messenger.connect(&address, Policy::LossyClient);
    connection.ready().await.map_err(|reason| reason.to_string())?;
    connection.send(Message::new(MON_GET_MAP)).await.map_err(|error| error.to_string())?;
    let waiting = came.wait_until(|| map.borrow().is_some() || connection.reason().is_some());
    timeout(Duration::from_secs(10), waiting).await.map_err(|_| "no map came within 10 s")?;
    let len = map.borrow().ok_or_else(|| format!("{:?}", connection.reason()))?;
    messenger.shutdown();
    Ok(format!("a map of {len} bytes"))
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
    match reactor.block_on(ask(&words)) {
        Ok(text) => {
            println!("{text}");
            ExitCode::SUCCESS
        }
        Err(text) => {
            eprintln!("{text}");
            ExitCode::FAILURE
        }
    }
}

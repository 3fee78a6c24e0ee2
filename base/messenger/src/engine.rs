//! Asynchronous part: accepting, connecting, handshakes, and the streams of connections.

mod client;
mod liveness;
mod server;
mod stream;

pub(crate) use client::client;
pub(crate) use server::accept;

use forebay_reactor::random;

use crate::connection::DisconnectReason;
use crate::session::{HandshakeProgress, MessengerHandshake};
use crate::transport::Channel;

/// Sends and receives until the handshake makes progress that the caller must handle; `state` names the current step
/// for error texts.
async fn drive(
    handshake: &mut MessengerHandshake,
    channel: &Channel,
    state: &mut &'static str,
) -> Result<HandshakeProgress, DisconnectReason> {
    loop {
        let stepped = handshake.step(&mut random);
        let out = handshake.output();
        if !out.is_empty() {
            channel.clone().send(out).await?;
        }
        match stepped? {
            HandshakeProgress::NeedInput => {}
            progress => return Ok(progress),
        }
        *state = handshake.state();
        let want = handshake.want();
        let (result, buf) = channel.clone().recv(want.buf, want.all).await;
        match result? {
            0 => return Err(DisconnectReason::PeerClosed),
            got => handshake.received(buf, got),
        }
    }
}

//! Owner's side of a window: executes the requests that a peer without a device sends as messages.

use std::rc::Rc;

use forebay_reactor::{Buf, BufList, spawn};

use super::{DONE, FAILED, KIND_PERSIST, KIND_WRITE, NO_WINDOW, NOT_DURABLE, PAST_THE_END, Persisting, WindowContent};
use crate::connection::Conn;
use crate::message::Message;
use crate::wire::codec::PayloadReader;

/// Executes a message of the role `Window`.  Called where handlers are.
pub(crate) fn execute(conn: &Rc<Conn>, message: Message) {
    let (code, persisting) = match start(conn, &message) {
        Ok(persisting) => (DONE, persisting),
        Err(code) => (code, None),
    };
    let Some(persisting) = persisting else { return reply(conn, message, code, String::new()) };
    let conn = conn.clone();
    drop(spawn(async move {
        match persisting.await {
            Ok(()) => reply(&conn, message, DONE, String::new()),
            Err(error) => reply(&conn, message, FAILED, error.to_string()),
        }
    }));
}

/// Executes a write, or returns the future of a persist request.
///
/// # Errors
/// Type of the reply that names the error.
fn start(conn: &Conn, message: &Message) -> Result<Option<Persisting>, u16> {
    let front = message.front.clone().into_contiguous();
    let mut reader = PayloadReader::new(&front, "a request to a window");
    let (Ok(id), Ok(offset), Ok(len)) = (reader.u64(), reader.u64(), reader.u64()) else { return Err(NO_WINDOW) };
    let window = conn.windows.get(id).ok_or(NO_WINDOW)?;
    if offset.checked_add(len).is_none_or(|end| end > window.len) {
        return Err(PAST_THE_END);
    }
    match message.kind {
        KIND_WRITE if message.data.len() as u64 == len => {
            window.put(offset, &message.data);
            Ok(None)
        }
        KIND_WRITE => Err(PAST_THE_END),
        KIND_PERSIST => {
            let persist = window.persist.borrow().clone().ok_or(NOT_DURABLE)?;
            Ok(Some(persist(WindowContent(window), offset, len)))
        }
        _ => Err(NO_WINDOW),
    }
}

/// Replies to a request.
fn reply(conn: &Rc<Conn>, mut request: Message, code: u16, text: String) {
    let mut reply = request.reply(code).front(Buf::copy_of(text.as_bytes()));
    // The written bytes are in the window; only their budget share is kept until the reply is queued.
    request.data = BufList::new();
    if !matches!(conn.offer(&mut reply, &mut None), Ok(false)) {
        return;
    }
    let conn = conn.clone();
    drop(spawn(async move {
        // If the send queue is full, the reply waits for it, and keeps the peer's budget share meanwhile.
        let _ = conn.queue(reply, None).await;
        drop(request);
    }));
}

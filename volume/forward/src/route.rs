//! Ways to the owner of a volume: another daemon, or this one.

use std::fmt;
use std::rc::Rc;

use forebay_messenger::{Connection, Message, SendError};

use crate::client::ForwardClient;
use crate::host::ForwardHost;
use crate::wire::{self, ForwardAnswer, ForwardRequest, KIND_REQUEST, VolumeRequest};

/// Way to the owner of a volume.
#[derive(Clone)]
pub enum OwnerRoute {
    /// Another daemon, over a connection of the messenger.
    Remote(Connection),
    /// Owner in the same daemon: requests are executed without a message, under the same rules.
    Local(Rc<ForwardHost>),
}

impl PartialEq for OwnerRoute {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Remote(one), Self::Remote(other)) => one == other,
            (Self::Local(one), Self::Local(other)) => Rc::ptr_eq(one, other),
            _ => false,
        }
    }
}

impl fmt::Debug for OwnerRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Remote(connection) => write!(f, "{connection:?}"),
            Self::Local(_) => f.write_str("this daemon"),
        }
    }
}

/// Request that is ready to be sent.
pub(crate) enum PreparedRequest {
    Message(Message),
    Local(VolumeRequest),
}

/// Reason for which a request has no answer.
pub(crate) enum RouteError {
    /// The connection has ended: the request may be executed.
    Lost(String),
    /// The request cannot be sent, or its answer not be read.
    Failed(String),
}

impl RouteError {
    pub(crate) fn into_text(self) -> String {
        match self {
            Self::Lost(text) | Self::Failed(text) => text,
        }
    }
}

impl OwnerRoute {
    /// Asks for a session of a volume.
    pub(crate) async fn open(
        &self,
        client: &Rc<ForwardClient>,
        volume: &str,
        session: u64,
    ) -> Result<ForwardAnswer, RouteError> {
        match self {
            Self::Local(host) => Ok(host.open_local(client, volume, session).await),
            Self::Remote(connection) => {
                let (volume, start, lease) = (volume.to_owned(), *client.start(), client.lease());
                let open = ForwardRequest::Open { volume, start, session, lease };
                request(connection, wire::message(KIND_REQUEST, open.encode())).await
            }
        }
    }

    /// Prepares a request in a session.
    pub(crate) fn prepare(&self, session: u64, request: &VolumeRequest) -> PreparedRequest {
        match self {
            Self::Local(_) => PreparedRequest::Local(request.clone()),
            Self::Remote(_) => PreparedRequest::Message(wire::message(KIND_REQUEST, request.encode(session))),
        }
    }

    /// Sends a request in a session, and waits for its answer.
    pub(crate) async fn execute(
        &self,
        client: &Rc<ForwardClient>,
        session: u64,
        prepared: PreparedRequest,
    ) -> Result<ForwardAnswer, RouteError> {
        match (self, prepared) {
            (Self::Local(host), PreparedRequest::Local(request)) => {
                Ok(host.execute_local(client, session, request).await)
            }
            (Self::Remote(connection), PreparedRequest::Message(message)) => request(connection, message).await,
            _ => Err(RouteError::Failed("the request was prepared for another route".into())),
        }
    }

    /// Tells the owner that this forwarder has adopted a reservation table.
    pub(crate) async fn adopted(&self, client: &Rc<ForwardClient>, session: u64, number: u64) {
        match self {
            Self::Local(host) => host.adopted_local(client, session, number),
            Self::Remote(connection) => {
                let adopted = ForwardRequest::Adopted { session, number };
                // Without the connection there is no session.
                let _ = connection.request(wire::message(KIND_REQUEST, adopted.encode())).await;
            }
        }
    }

    /// Ends a session; returns whether the owner has confirmed it.  Without the connection it ends later.
    pub(crate) async fn close(&self, client: &Rc<ForwardClient>, session: u64) -> bool {
        match self {
            Self::Local(host) => {
                host.close_local(client, session);
                true
            }
            Self::Remote(connection) => {
                let close = ForwardRequest::Close { session };
                let answer = request(connection, wire::message(KIND_REQUEST, close.encode())).await;
                matches!(answer, Ok(ForwardAnswer::Done))
            }
        }
    }
}

pub(crate) async fn request(connection: &Connection, message: Message) -> Result<ForwardAnswer, RouteError> {
    let mut reply = match connection.request(message).await {
        Ok(reply) => reply,
        Err(SendError::Ended(reason)) => {
            return Err(RouteError::Lost(format!("connection to the owner lost: {reason}")));
        }
        Err(error) => return Err(RouteError::Failed(error.to_string())),
    };
    let data = std::mem::take(&mut reply.data);
    let decoded = wire::front(&reply).and_then(|front| ForwardAnswer::decode(&front, data));
    decoded.map_err(|error| RouteError::Failed(error.to_string()))
}

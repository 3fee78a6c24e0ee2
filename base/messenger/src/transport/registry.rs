//! Dispatch to the transport of an address, a listener or a stream: the only place that distinguishes them.

/// Generates [`Address`](super::Address), `Acceptor`, `PendingConnection` and `Channel` from the list of transports.
///
/// Each is an enum with a variant per transport, so that a send or receive costs a branch and no allocation.
macro_rules! transports {
    ($($(#[$doc:meta])* $name:ident($endpoint:ty) = $transport:ty;)+) => {
        /// Address that a messenger listens at or connects to.
        ///
        /// `HOST:PORT` and `tcp:HOST:PORT` are TCP, `rdma:HOST:PORT` RDMA, or TCP where RDMA is unavailable,
        /// `unix:PATH` a Unix socket, `shm:PATH` shared memory that is set up over a Unix socket, `loopback:NAME` a
        /// messenger of the same process on the same core.
        #[derive(Debug, Clone, PartialEq, Eq, Hash)]
        pub enum Address {
            $($(#[$doc])* $name($endpoint),)+
            /// Endpoint of the same process: messages are passed without being serialised.
            Loopback(String),
        }

        impl Address {
            /// Returns the socket address, if there is one.
            pub fn socket(&self) -> Option<SocketAddr> {
                match self {
                    $(Self::$name(endpoint) => <$transport>::socket(endpoint),)+
                    Self::Loopback(_) => None,
                }
            }

            /// Returns the Unix socket address that it is, or is set up over.
            pub fn unix(&self) -> Option<Addr> {
                match self {
                    $(Self::$name(endpoint) => <$transport>::unix(endpoint),)+
                    Self::Loopback(_) => None,
                }
            }

            /// Parses an address that begins with the scheme of a byte transport; `None` if it does not.
            fn with_scheme(text: &str) -> Option<Result<Self, AddrError>> {
                let (scheme, rest) = text.split_once(':')?;
                $(if scheme == <$transport>::SCHEME {
                    return Some(<$transport>::parse(rest));
                })+
                None
            }
        }

        impl fmt::Display for Address {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$name(endpoint) => {
                        write!(f, "{}:{}", <$transport>::SCHEME, <$transport>::display(endpoint))
                    })+
                    Self::Loopback(name) => write!(f, "loopback:{name}"),
                }
            }
        }

        /// Listening endpoint of a byte transport.
        pub(crate) enum Acceptor {
            $($(#[$doc])* $name(<$transport as Transport>::Acceptor),)+
        }

        impl Acceptor {
            /// Listens at `address`, and returns the listeners with the address as bound.
            ///
            /// # Errors
            /// Errors of binding; `ConnectionRefused` for a loopback address, which is no byte stream.
            pub(crate) fn bind(address: &Address, options: TransportOptions) -> io::Result<(Vec<Self>, Address)> {
                match address {
                    $(Address::$name(endpoint) => <$transport>::bind(endpoint, options),)+
                    Address::Loopback(name) => Err(no_local_endpoint(name)),
                }
            }

            /// Returns the next incoming connection, for which no resources have been allocated yet, and its peer
            /// address.
            pub(crate) async fn accept(&self) -> io::Result<(PendingConnection, Address)> {
                match self {
                    $(Self::$name(acceptor) => {
                        let (pending, peer) = <$transport>::accept(acceptor).await?;
                        Ok((PendingConnection::$name(pending), peer))
                    })+
                }
            }
        }

        /// Incoming connection that was not admitted yet; rejected when it is dropped.
        pub(crate) enum PendingConnection {
            $($(#[$doc])* $name(<$transport as Transport>::Pending),)+
        }

        impl PendingConnection {
            /// Admits the connection and allocates its resources.
            pub(crate) fn admit(self) -> io::Result<Channel> {
                match self {
                    $(Self::$name(pending) => Ok(Channel::$name(<$transport>::admit(pending)?)),)+
                }
            }
        }

        /// Connection of a byte transport: an ordered byte stream in each direction.  Clones share it.
        #[derive(Clone)]
        pub(crate) enum Channel {
            $($(#[$doc])* $name(<$transport as Transport>::Stream),)+
        }

        impl Channel {
            /// Connects to a listener.
            ///
            /// # Errors
            /// Errors of connecting; `ConnectionRefused` for a loopback address, which is no byte stream.
            pub(crate) async fn connect(address: &Address, options: TransportOptions) -> io::Result<Self> {
                match address {
                    $(Address::$name(endpoint) => <$transport>::connect(endpoint, options).await,)+
                    Address::Loopback(name) => Err(no_local_endpoint(name)),
                }
            }

            /// Returns the transport's name, as in addresses.
            pub(crate) fn name(&self) -> &'static str {
                match self {
                    $(Self::$name(_) => <$transport>::SCHEME,)+
                }
            }

            /// Returns the RDMA stream, if its device can write into the peer's memory.
            pub(crate) fn rdma(&self) -> Option<RdmaStream> {
                match self {
                    $(Self::$name(stream) => <$transport>::rdma(stream),)+
                }
            }

            /// Returns true if bytes cannot be corrupted in transit, so that checksums are redundant.
            pub(crate) fn is_sound(&self) -> bool {
                match self {
                    $(Self::$name(_) => <$transport>::IS_SOUND,)+
                }
            }

            /// Receives into the buffer's spare capacity: the available bytes, or (`all`) until it is full.  Returns 0
            /// at the end of the stream.
            pub(crate) async fn recv(self, buf: BufMut, all: bool) -> (io::Result<usize>, BufMut) {
                match self {
                    $(Self::$name(stream) if !all => <$transport>::recv(&stream, buf).await,)+
                    $(Self::$name(stream) => <$transport>::recv_exact(&stream, buf).await,)+
                }
            }

            /// Sends all bytes.
            pub(crate) async fn send(self, bufs: BufList) -> io::Result<()> {
                match self {
                    $(Self::$name(stream) => <$transport>::send(&stream, bufs).await,)+
                }
            }

            /// Shuts down both directions.
            pub(crate) fn shutdown(&self) {
                match self {
                    $(Self::$name(stream) => <$transport>::shutdown(stream),)+
                }
            }
        }
    };
}

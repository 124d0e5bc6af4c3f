//! Owns how two ranks meet: the id names a place where the process that made the id listens, and the other rank connects to it. As in
//! the real library the id opens the listener, at once, and nobody closes it before a communicator of the id is made.
//!
//! TCP is used when `FALSE_NCCL_ADDRESS` or `NCCL_SOCKET_IFNAME` is set. The latter is read as NCCL documents it: `eth` are the
//! interfaces whose name begins so, `=eth0` is this one, `^docker` is none of these; several by commas. The first one that is up and
//! has an IPv4 address is taken. Without a port the system chooses one of `net.ipv4.ip_local_port_range`, as NCCL's documents say.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{self, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::socket::{Listener, Socket};

/// `ncclUniqueId`: a mark, a socket address as C has it, which is where the real one (2.28) has its own, and a nonce that is also
/// the name of the Unix socket.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UniqueId {
    pub internal: [u8; 128],
}

const MARK: [u8; 8] = *b"falsenc1";
/// `AF_UNIX` or `AF_INET`.
const FAMILY: std::ops::Range<usize> = 8..10;
const PORT: std::ops::Range<usize> = 10..12;
const ADDRESS: std::ops::Range<usize> = 12..16;
const NONCE: std::ops::Range<usize> = 40..56;
/// One step of a connection, after which an abort is seen.
const CONNECT_MAX: Duration = Duration::from_millis(100);

/// What the variables ask for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wanted {
    pub(crate) address: Option<String>,
    pub(crate) interfaces: Option<String>,
}

type Nonce = [u8; 16];

/// As `sockaddr` has it.
fn family(number: libc::c_int) -> [u8; 2] {
    (number as u16).to_ne_bytes()
}

/// Listeners of ids that this process made and no communicator has taken.
static LISTENERS: Mutex<BTreeMap<Nonce, Listener>> = Mutex::new(BTreeMap::new());

fn new_nonce() -> Nonce {
    static IDS: AtomicU64 = AtomicU64::new(1);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let count = IDS.fetch_add(1, Ordering::Relaxed);
    let unique = (u64::from(std::process::id()) << 32) ^ count;
    let mut nonce = [0; 16];
    nonce[..8].copy_from_slice(&(now.as_nanos() as u64).to_le_bytes());
    nonce[8..].copy_from_slice(&unique.to_le_bytes());
    nonce
}

fn unix_address(nonce: &Nonce) -> io::Result<net::SocketAddr> {
    let name: String = nonce.iter().map(|byte| format!("{byte:02x}")).collect();
    net::SocketAddr::from_abstract_name(format!("false-nccl-{name}"))
}

fn matches_interface(wanted: &str, name: &str) -> bool {
    let is_one_of = |list: &str| list.split(',').any(|prefix| name.starts_with(prefix));
    match (wanted.strip_prefix('='), wanted.strip_prefix('^')) {
        (Some(exact), _) => exact.split(',').any(|wanted| wanted == name),
        (_, Some(excluded)) => !is_one_of(excluded),
        _ => is_one_of(wanted),
    }
}

fn address_of_interface(wanted: &str) -> Option<Ipv4Addr> {
    let mut first: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: the call fills the place with a list that is freed below.
    if unsafe { libc::getifaddrs(&mut first) } != 0 {
        return None;
    }
    let (mut at, mut found) = (first, None);
    // SAFETY: the entries of the list and what they point to are good until `freeifaddrs`. An address of family AF_INET is a
    // `sockaddr_in`.
    while let (Some(entry), None) = (unsafe { at.as_ref() }, found) {
        // SAFETY: as above.
        found = unsafe {
            let name = CStr::from_ptr(entry.ifa_name).to_string_lossy();
            let is_up = entry.ifa_flags & libc::IFF_UP as libc::c_uint != 0;
            let family = entry.ifa_addr.as_ref().map(|address| i32::from(address.sa_family));
            (is_up && family == Some(libc::AF_INET) && matches_interface(wanted, &name)).then(|| {
                let address = entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned();
                Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr))
            })
        };
        at = entry.ifa_next;
    }
    // SAFETY: the list is from `getifaddrs`, and nothing of it is used after this.
    unsafe { libc::freeifaddrs(first) };
    found
}

/// Where to listen over TCP. `None`: on a Unix socket.
fn tcp_address(wanted: &Wanted) -> io::Result<Option<SocketAddr>> {
    let bad = |what: &str| io::Error::new(io::ErrorKind::AddrNotAvailable, what.to_owned());
    if let Some(address) = wanted.address.as_deref().filter(|address| !address.is_empty()) {
        let with_port = address
            .parse()
            .or_else(|_| address.parse().map(|ip: IpAddr| SocketAddr::new(ip, 0)));
        let address: SocketAddr = with_port.map_err(|_| bad("FALSE_NCCL_ADDRESS is no address"))?;
        return if address.is_ipv4() {
            Ok(Some(address))
        } else {
            Err(bad("only IPv4 is there"))
        };
    }
    let Some(interfaces) = wanted.interfaces.as_deref().filter(|interfaces| !interfaces.is_empty()) else {
        return Ok(None);
    };
    let address = address_of_interface(interfaces).ok_or_else(|| bad("no interface of NCCL_SOCKET_IFNAME is up"))?;
    Ok(Some(SocketAddr::new(address.into(), 0)))
}

/// A new id, whose listener waits in this process.
pub(crate) fn new_id(wanted: &Wanted) -> io::Result<UniqueId> {
    let nonce = new_nonce();
    let mut internal = [0; 128];
    internal[..8].copy_from_slice(&MARK);
    internal[FAMILY].copy_from_slice(&family(libc::AF_UNIX));
    internal[NONCE].copy_from_slice(&nonce);
    let listener = match tcp_address(wanted)? {
        None => {
            let listener = UnixListener::bind_addr(&unix_address(&nonce)?)?;
            listener.set_nonblocking(true)?;
            Listener::Unix(listener)
        }
        Some(address) => {
            let listener = TcpListener::bind(address)?;
            listener.set_nonblocking(true)?;
            let address = listener.local_addr()?;
            if let IpAddr::V4(ip) = address.ip() {
                internal[FAMILY].copy_from_slice(&family(libc::AF_INET));
                internal[ADDRESS].copy_from_slice(&ip.octets());
                internal[PORT].copy_from_slice(&address.port().to_be_bytes());
            }
            Listener::Tcp(listener)
        }
    };
    LISTENERS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .insert(nonce, listener);
    Ok(UniqueId { internal })
}

/// One side of a meeting.
#[derive(Debug)]
pub(crate) enum Meeting {
    Listens(Listener),
    Connects(UniqueId),
}

impl Meeting {
    /// Who made the id listens; a second rank of the same process connects. `None`: no id of the double.
    pub(crate) fn new(id: &UniqueId) -> Option<Self> {
        if id.internal[..8] != MARK {
            return None;
        }
        let nonce: Nonce = id.internal[NONCE].try_into().ok()?;
        let listener = LISTENERS.lock().unwrap_or_else(PoisonError::into_inner).remove(&nonce);
        Some(listener.map_or(Meeting::Connects(*id), Meeting::Listens))
    }

    /// `None`: the other rank is not there yet.
    pub(crate) fn step(&self) -> Option<Socket> {
        let socket = match self {
            Meeting::Listens(listener) => return listener.accept().ok().flatten(),
            Meeting::Connects(UniqueId { internal }) if internal[FAMILY] == family(libc::AF_INET) => {
                let ip: [u8; 4] = internal[ADDRESS].try_into().ok()?;
                let port = u16::from_be_bytes(internal[PORT].try_into().ok()?);
                Socket::Tcp(TcpStream::connect_timeout(&(Ipv4Addr::from(ip), port).into(), CONNECT_MAX).ok()?)
            }
            Meeting::Connects(UniqueId { internal }) => {
                let nonce: Nonce = internal[NONCE].try_into().ok()?;
                Socket::Unix(UnixStream::connect_addr(&unix_address(&nonce).ok()?).ok()?)
            }
        };
        socket.without_waits().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_are_chosen_as_nccl_documents_it() {
        assert!(matches_interface("eth,ib", "ib0") && !matches_interface("eth", "lo"));
        assert!(matches_interface("=eth0", "eth0") && !matches_interface("=eth0", "eth01"));
        assert!(matches_interface("^docker,lo", "eth0") && !matches_interface("^docker,lo", "lo"));
    }

    #[test]
    fn an_address_without_a_port_gets_one_and_the_id_carries_it() {
        let wanted = Wanted {
            address: Some("127.0.0.1".to_owned()),
            interfaces: None,
        };
        let id = new_id(&wanted).unwrap();
        assert_eq!(id.internal[FAMILY], family(libc::AF_INET));
        assert_eq!(id.internal[ADDRESS], [127, 0, 0, 1]);
        assert_ne!(id.internal[PORT], [0, 0]);
    }

    #[test]
    fn a_bad_address_is_an_error() {
        for address in ["nowhere", "::1"] {
            let wanted = Wanted {
                address: Some(address.to_owned()),
                interfaces: None,
            };
            assert!(new_id(&wanted).is_err());
        }
        let wanted = Wanted {
            address: None,
            interfaces: Some("=none-of-this-name".to_owned()),
        };
        assert!(new_id(&wanted).is_err());
    }

    #[test]
    fn two_sides_meet_over_either_kind_of_socket() {
        for address in [None, Some("127.0.0.1".to_owned())] {
            let id = new_id(&Wanted {
                address,
                interfaces: None,
            })
            .unwrap();
            let (one, two) = (Meeting::new(&id).unwrap(), Meeting::new(&id).unwrap());
            assert!(matches!((&one, &two), (Meeting::Listens(_), Meeting::Connects(_))));
            let connected = two.step().is_some();
            let accepted = (0..1000).any(|_| one.step().is_some());
            assert!(connected && accepted);
        }
        assert!(Meeting::new(&UniqueId { internal: [0; 128] }).is_none());
    }
}

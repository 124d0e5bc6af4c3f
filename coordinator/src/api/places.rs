//! Which client may have a connection: there is a limit in all, a limit for one address, and a few places that only probes
//! can use.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use service_runtime::serve::network_of;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;

/// Connections beyond the limit that are served probes only. A probe asks at once and leaves, so the newest connections get
/// these places: one more connection closes the oldest. A place ends with its answer, or after two seconds without a
/// request.
const PROBE_PLACES: usize = 64;
/// The part of all connections that one address, or one network of IPv6, may have. A proxy in front has one address, so the limit must suit it.
const OF_ONE_ADDRESS: (usize, usize) = (3, 4);

#[derive(Debug)]
struct Taken {
    by_address: Mutex<HashMap<IpAddr, usize>>,
}

impl Taken {
    fn lock(&self) -> MutexGuard<'_, HashMap<IpAddr, usize>> {
        self.by_address.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Clone, Debug)]
pub struct Places {
    any: Arc<Semaphore>,
    taken: Arc<Taken>,
    of_one_address_max: usize,
}

/// Which requests a connection may make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serves {
    Everything,
    Probes,
}

/// A connection's place. Dropping it gives the place back.
#[derive(Debug)]
pub struct Place {
    pub serves: Serves,
    /// `None` for a connection that is served probes only.
    counted: Option<(OwnedSemaphorePermit, Arc<Taken>, IpAddr)>,
}

/// The connections that are served probes only, oldest first.
#[derive(Debug, Default)]
pub struct ProbeConnections(VecDeque<AbortHandle>);

impl ProbeConnections {
    pub fn add(&mut self, connection: AbortHandle) {
        self.0.push_back(connection);
        if self.0.len() > PROBE_PLACES
            && let Some(oldest) = self.0.pop_front()
        {
            oldest.abort();
        }
    }
}

impl Places {
    pub fn new(connections_max: usize) -> Self {
        let (part, whole) = OF_ONE_ADDRESS;
        Self {
            any: Arc::new(Semaphore::new(connections_max.min(Semaphore::MAX_PERMITS))),
            taken: Arc::new(Taken {
                by_address: Mutex::default(),
            }),
            of_one_address_max: (connections_max / whole * part).max(1),
        }
    }

    pub fn take(&self, address: IpAddr) -> Place {
        let address = network_of(address);
        let mut taken = self.taken.lock();
        let own = taken.get(&address).copied().unwrap_or(0);
        let is_greedy = own >= self.of_one_address_max;
        match self.any.clone().try_acquire_owned() {
            Ok(permit) if !is_greedy => {
                taken.insert(address, own + 1);
                Place {
                    serves: Serves::Everything,
                    counted: Some((permit, self.taken.clone(), address)),
                }
            }
            _ => Place {
                serves: Serves::Probes,
                counted: None,
            },
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let Some((_permit, taken, address)) = self.counted.take() else {
            return;
        };
        let mut taken = taken.lock();
        match taken.get_mut(&address) {
            Some(own) if *own > 1 => *own -= 1,
            _ => {
                taken.remove(&address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_leaves_a_part_to_others_and_beyond_it_probes_are_served() {
        let (greedy, other) = (IpAddr::from([127, 0, 0, 1]), IpAddr::from([127, 0, 0, 2]));
        let places = Places::new(8);
        let mut held: Vec<_> = (0..7).map(|_| places.take(greedy)).collect();
        let serves: Vec<_> = held.iter().map(|place| place.serves).collect();
        assert_eq!(serves[..6], [Serves::Everything; 6]);
        assert_eq!(serves[6], Serves::Probes);
        let others = [places.take(other), places.take(other)];
        assert!(others.iter().all(|place| place.serves == Serves::Everything));
        assert_eq!(places.take(other).serves, Serves::Probes, "the table is full");
        held.clear();
        assert_eq!(places.take(greedy).serves, Serves::Everything);
        drop(others);
        assert!(places.taken.lock().is_empty());
    }

    #[test]
    fn a_host_with_many_addresses_has_the_places_of_one() {
        let places = Places::new(8);
        let of = |host: u16, number: u16| IpAddr::from([0x2001, 0xdb8, 0, host, 0, 0, 0, number]);
        let held: Vec<_> = (0..7).map(|number| places.take(of(1, number))).collect();
        assert_eq!(held[6].serves, Serves::Probes);
        assert_eq!(places.take(of(2, 0)).serves, Serves::Everything, "another network");
    }

    #[tokio::test]
    async fn the_newest_have_the_places_of_probes() {
        let mut probes = ProbeConnections::default();
        let idle = || tokio::spawn(std::future::pending::<()>());
        let oldest = idle();
        probes.add(oldest.abort_handle());
        let newer: Vec<_> = (0..PROBE_PLACES).map(|_| idle()).collect();
        newer
            .iter()
            .for_each(|connection| probes.add(connection.abort_handle()));
        assert!(oldest.await.is_err_and(|error| error.is_cancelled()));
        assert!(newer.iter().all(|connection| !connection.is_finished()));
    }
}

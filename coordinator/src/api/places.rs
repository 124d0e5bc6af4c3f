//! Who may have a connection: a number in all, a part of it for one address, and a few places that only probes can use.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Connections beyond the limit that are served probes only. A probe asks and leaves; these connections are closed after one
/// answer, or after two seconds without a question.
const PROBE_PLACES: usize = 64;
/// One address may have this part of all connections: a proxy in front has one address, and should be given a limit to match.
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
    probes: Arc<Semaphore>,
    taken: Arc<Taken>,
    of_one_address_max: usize,
}

/// What a connection may ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serves {
    Everything,
    Probes,
}

/// A connection's place; dropping it gives the place back.
#[derive(Debug)]
pub struct Place {
    pub serves: Serves,
    _permit: OwnedSemaphorePermit,
    counted: Option<(Arc<Taken>, IpAddr)>,
}

impl Places {
    pub fn new(connections_max: usize) -> Self {
        let (part, whole) = OF_ONE_ADDRESS;
        Self {
            any: Arc::new(Semaphore::new(connections_max.min(Semaphore::MAX_PERMITS))),
            probes: Arc::new(Semaphore::new(PROBE_PLACES)),
            taken: Arc::new(Taken {
                by_address: Mutex::default(),
            }),
            of_one_address_max: (connections_max / whole * part).max(1),
        }
    }

    /// `None`: the connection is to be closed at once.
    pub fn take(&self, address: IpAddr) -> Option<Place> {
        let mut taken = self.taken.lock();
        let own = taken.get(&address).copied().unwrap_or(0);
        if own < self.of_one_address_max
            && let Ok(permit) = self.any.clone().try_acquire_owned()
        {
            taken.insert(address, own + 1);
            return Some(Place {
                serves: Serves::Everything,
                _permit: permit,
                counted: Some((self.taken.clone(), address)),
            });
        }
        let permit = self.probes.clone().try_acquire_owned().ok()?;
        Some(Place {
            serves: Serves::Probes,
            _permit: permit,
            counted: None,
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let Some((taken, address)) = self.counted.take() else {
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
        let serves = |place: &Option<Place>| place.as_ref().map(|place| place.serves);
        let mut held: Vec<_> = (0..6).map(|_| places.take(greedy)).collect();
        assert!(held.iter().all(|place| serves(place) == Some(Serves::Everything)));
        held.extend((0..PROBE_PLACES).map(|_| places.take(greedy)));
        assert!(held[6..].iter().all(|place| serves(place) == Some(Serves::Probes)));
        assert!(places.take(greedy).is_none(), "every place for probes is taken");
        let others = [places.take(other), places.take(other)];
        assert!(others.iter().all(|place| serves(place) == Some(Serves::Everything)));
        assert!(places.take(other).is_none(), "the table is full");
        held.clear();
        assert_eq!(serves(&places.take(greedy)), Some(Serves::Everything));
        drop(others);
        assert!(places.taken.lock().is_empty());
    }
}

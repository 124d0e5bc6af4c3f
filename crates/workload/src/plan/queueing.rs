//! Queues: Little's law, the single server (M/M/1), and one queue for all servers (M/M/c).
//!
//! Sources: J. D. C. Little, "A proof for the queuing formula L = lambda W", Operations Research 9 (1961). M/M/1 and M/M/c
//! with Erlang's C formula: L. Kleinrock, "Queueing Systems", volume 1 (1975), chapter 3. Both assume Poisson arrivals and
//! exponential service times. Real service times vary less when prompts are alike, and more when lengths have a long tail.

use super::PlanError;
use super::check::{finite, open_share, positive, servers};

/// Requests that arrive at servers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Requests a second.
    pub rate: f64,
    /// Seconds that one request keeps one server busy.
    pub service_s: f64,
}

impl Load {
    /// Servers that are busy on average: the offered load in erlangs.
    ///
    /// # Errors
    /// The rate or the service time is not above 0.
    pub fn busy(self) -> Result<f64, PlanError> {
        let busy = positive("the rate", self.rate)? * positive("the service time", self.service_s)?;
        finite("the number of busy servers", busy)
    }
}

/// Requests in a system at one time: the rate times the time that each one stays.
///
/// # Errors
/// The rate or the time is not above 0.
pub fn in_system(rate: f64, time_s: f64) -> Result<f64, PlanError> {
    let count = positive("the rate", rate)? * positive("the time in the system", time_s)?;
    finite("the number in the system", count)
}

/// Waits in front of servers, without the service itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wait {
    /// Share of the requests that wait at all.
    pub share_waiting: f64,
    pub mean_s: f64,
    pub p99_s: f64,
}

/// Each server has a queue of its own, and requests are spread evenly and blindly (M/M/1).
///
/// # Errors
/// An input is not above 0, or the servers are always busy.
pub(crate) fn wait_alone(load: Load, count: u32) -> Result<Wait, PlanError> {
    let utilisation = utilisation(load, count)?;
    Ok(wait(utilisation, load.service_s / (1.0 - utilisation)))
}

/// One queue for all servers (M/M/c).
///
/// # Errors
/// An input is not above 0, or the servers are always busy.
pub(crate) fn wait_pooled(load: Load, count: u32) -> Result<Wait, PlanError> {
    let utilisation = utilisation(load, count)?;
    let waiting = erlang_c(load.busy()?, count);
    Ok(wait(waiting, load.service_s / (f64::from(count) * (1.0 - utilisation))))
}

/// Time in an M/M/1 queue and its server, by the service time alone: 5 at a utilisation of 0.8, 4 times the 1.25 at 0.2.
///
/// # Errors
/// The utilisation is not between 0 and 1.
pub fn slowdown_alone(utilisation: f64) -> Result<f64, PlanError> {
    Ok(1.0 / (1.0 - open_share("the utilisation", utilisation)?))
}

/// A wait is exponential with the mean `scale_s` for those who wait at all.
fn wait(share_waiting: f64, scale_s: f64) -> Wait {
    Wait {
        share_waiting,
        mean_s: share_waiting * scale_s,
        p99_s: scale_s * (share_waiting / 0.01).ln().max(0.0),
    }
}

fn utilisation(load: Load, count: u32) -> Result<f64, PlanError> {
    let count = servers("the number of servers", f64::from(count))?;
    open_share("the utilisation", load.busy()? / f64::from(count))
}

/// The chance that a request finds all `count` servers busy. Erlang's B formula is computed by its recursion, which does not
/// overflow as factorials do.
fn erlang_c(busy: f64, count: u32) -> f64 {
    let mut blocked = 1.0;
    for servers in 1..=count {
        blocked = busy * blocked / (f64::from(servers) + busy * blocked);
    }
    let utilisation = busy / f64::from(count);
    blocked / (1.0 - utilisation * (1.0 - blocked))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(got: f64, wanted: f64) {
        assert!(
            (got - wanted).abs() <= 1e-9 * wanted.abs().max(1e-9),
            "{got} != {wanted}"
        );
    }

    #[test]
    fn one_server_is_the_same_queue_in_both_formulas() {
        let load = Load {
            rate: 15.0,
            service_s: 0.04,
        };
        let (alone, pooled) = (wait_alone(load, 1).unwrap(), wait_pooled(load, 1).unwrap());
        close(alone.mean_s, 0.6 * 0.04 / 0.4);
        close(pooled.mean_s, alone.mean_s);
        close(pooled.share_waiting, 0.6);
        close(pooled.p99_s, alone.p99_s);
    }

    /// For two servers the formulas have the closed form 2 r^2 / (1 + r).
    #[test]
    fn two_servers_have_their_closed_form() {
        for utilisation in [0.1, 0.5, 0.9, 0.99] {
            close(
                erlang_c(2.0 * utilisation, 2),
                2.0 * utilisation * utilisation / (1.0 + utilisation),
            );
        }
    }

    /// The definition with sums and factorials, for few servers.
    #[test]
    fn the_recursion_is_erlangs_definition() {
        for (busy, count) in [(3.0_f64, 5_u32), (9.5, 10), (0.2, 3), (19.0, 20)] {
            let mut term = 1.0;
            let mut sum = 0.0;
            for k in 0..count {
                sum += term;
                term *= busy / f64::from(k + 1);
            }
            let last = term / (1.0 - busy / f64::from(count));
            close(erlang_c(busy, count), last / (sum + last));
        }
    }

    #[test]
    fn always_busy_servers_are_an_error() {
        let load = Load {
            rate: 1000.0,
            service_s: 0.04,
        };
        assert!(matches!(wait_alone(load, 40), Err(PlanError::NotAShare { .. })));
        assert!(matches!(wait_pooled(load, 39), Err(PlanError::NotAShare { .. })));
        assert!(wait_pooled(load, 41).is_ok());
        let none = Load { rate: f64::NAN, ..load };
        assert!(wait_pooled(none, 41).is_err());
    }

    #[test]
    fn the_99th_percentile_waits_only_when_more_than_one_in_a_hundred_wait() {
        let pooled = wait(0.009, 1.0);
        close(pooled.p99_s, 0.0);
        close(wait(0.6, 0.1).p99_s, 0.1 * 60.0_f64.ln());
    }

    #[test]
    fn a_tail_at_eight_tenths_is_four_times_the_tail_at_two_tenths() {
        close(slowdown_alone(0.8).unwrap() / slowdown_alone(0.2).unwrap(), 4.0);
        assert!(slowdown_alone(1.0).is_err());
    }
}

//! Prints docs/reference/metrics.md as the tables of metrics have it.

#![forbid(unsafe_code)]

fn main() {
    print!("{}", service_runtime::metrics::docs::page());
}

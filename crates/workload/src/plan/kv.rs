//! KV bytes of a token, and how long they take over a link.
//!
//! Sources: 2 x layers x KV heads x head size x bytes of a value, as in ARCHITECTURE.md section 1 (J. Ainslie et al., "GQA",
//! 2023, for fewer KV heads than query heads). PCIe: 16 lanes of 16 GT/s (4.0) or 32 GT/s (5.0), 128 of 130 bits are data.
//! NVLink 4: 18 links of 25 GB/s in each direction (NVIDIA's data sheet of the H100 gives 900 GB/s for both directions).

use super::PlanError;
use super::check::{finite, not_negative, positive};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvShape {
    pub layers: f64,
    pub kv_heads: f64,
    pub head_size: f64,
    /// 2 for 16-bit values, 1 for 8-bit values.
    pub bytes_per_value: f64,
}

impl KvShape {
    /// # Errors
    /// A part is not above 0.
    pub fn bytes_per_token(self) -> Result<f64, PlanError> {
        let values = positive("the number of layers", self.layers)?
            * positive("the number of KV heads", self.kv_heads)?
            * positive("the head size", self.head_size)?;
        let bytes = 2.0 * values * positive("the bytes of a value", self.bytes_per_value)?;
        finite("the KV of a token", bytes)
    }
}

/// A link in one direction, at its line rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    pub name: &'static str,
    /// Bytes a second.
    pub rate: f64,
}

/// The slowest first.
pub const LINKS: [Link; 6] = [
    Link {
        name: "10 Gb/s",
        rate: 1.25e9,
    },
    Link {
        name: "100 Gb/s",
        rate: 12.5e9,
    },
    Link {
        name: "PCIe 4.0 x16",
        rate: 16e9 * 16.0 / 8.0 * 128.0 / 130.0,
    },
    Link {
        name: "400 Gb/s",
        rate: 50e9,
    },
    Link {
        name: "PCIe 5.0 x16",
        rate: 32e9 * 16.0 / 8.0 * 128.0 / 130.0,
    },
    Link {
        name: "NVLink 4",
        rate: 450e9,
    },
];

/// Bytes a second of a link that is named by its bits.
///
/// # Errors
/// The rate is not above 0.
pub fn rate_of_gbit(gbit: f64) -> Result<f64, PlanError> {
    Ok(positive("the link's rate", gbit)? * 1e9 / 8.0)
}

/// Seconds of a transfer at the line rate, when it reaches the share `efficiency` of it.
///
/// # Errors
/// An input is not above 0 (the bytes may be 0).
pub fn transfer_s(bytes: f64, rate: f64, efficiency: f64) -> Result<f64, PlanError> {
    let rate = positive("the link's rate", rate)? * positive("the link's efficiency", efficiency)?;
    finite("the time of the transfer", not_negative("the bytes", bytes)? / rate)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table of ARCHITECTURE.md section 1.
    #[test]
    fn the_sizes_of_the_architecture_page() {
        let smollm = KvShape {
            layers: 30.0,
            kv_heads: 3.0,
            head_size: 64.0,
            bytes_per_value: 2.0,
        };
        let llama = KvShape {
            layers: 32.0,
            kv_heads: 8.0,
            head_size: 128.0,
            bytes_per_value: 2.0,
        };
        assert_eq!(smollm.bytes_per_token(), Ok(23_040.0));
        assert_eq!(llama.bytes_per_token(), Ok(131_072.0));
        let ms = |shape: KvShape, gbit: f64| {
            let bytes = shape.bytes_per_token().unwrap() * 2048.0;
            transfer_s(bytes, rate_of_gbit(gbit).unwrap(), 1.0).unwrap() * 1e3
        };
        let rounded = |value: f64| (value * 10.0).round() / 10.0;
        assert_eq!(
            [10.0, 100.0, 400.0].map(|gbit| rounded(ms(smollm, gbit))),
            [37.7, 3.8, 0.9]
        );
        assert_eq!(
            [10.0, 100.0, 400.0].map(|gbit| rounded(ms(llama, gbit))),
            [214.7, 21.5, 5.4]
        );
    }

    #[test]
    fn links_rise_and_bad_inputs_are_errors() {
        assert!(LINKS.windows(2).all(|pair| pair[0].rate < pair[1].rate));
        for bad in [0.0, -1.0, f64::NAN] {
            assert!(rate_of_gbit(bad).is_err());
            assert!(transfer_s(1.0, bad, 1.0).is_err());
            assert!(transfer_s(1.0, 1.0, bad).is_err());
        }
        assert!(transfer_s(-1.0, 1.0, 1.0).is_err());
        assert_eq!(transfer_s(0.0, 1.0, 1.0), Ok(0.0));
    }
}

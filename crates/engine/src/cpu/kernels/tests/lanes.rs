//! The loops over lanes of f32.

use half::f16;
use proptest::prelude::*;

use super::*;
use crate::cpu::kernels::lanes::QuantisedBlock;
use crate::cpu::kernels::vector::Vector;

/// Sums, maxima and bytes of lanes, also of numbers for which order and sides decide.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[test]
fn lanes_come_together_as_they_do_in_arrays() {
    fn agree<V: Vector>() {
        const SPECIAL: [f32; 6] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 1e30];
        let mut random = Random(7);
        for round in 0..400 {
            let mut draw = || match random.next() as usize % 8 {
                special if round % 2 == 1 && special < SPECIAL.len() => SPECIAL[special],
                _ => random.float() * 1e3,
            };
            let (a, b): (Lanes, Lanes) = (std::array::from_fn(|_| draw()), std::array::from_fn(|_| draw()));
            // Which NaN it is, is nowhere said.
            let bits = |value: f32| (!value.is_nan()).then_some(value.to_bits());
            assert_eq!(bits(V::load(&a).tree_sum()), bits(a.tree_sum()), "{a:?}");
            let rows: [Lanes; LANES] = std::array::from_fn(|_| std::array::from_fn(|_| draw()));
            let sums = V::tree_sums(rows.map(|row| V::load(&row))).array();
            assert_eq!(sums.map(bits), rows.map(|row| bits(row.tree_sum())), "{rows:?}");
            assert_eq!(bits(V::load(&a).largest()), bits(a.largest()), "{a:?}");
            let bytes = V::low_bytes([V::load(&a), V::load(&b)]);
            assert_eq!(bytes, Vector::low_bytes([a, b]), "{a:?} {b:?}");
            let columns = V::transpose(rows.map(|row| V::load(&row))).map(|column| column.array().map(bits));
            assert_eq!(columns, Vector::transpose(rows).map(|column| column.map(bits)));
            let (x, y) = (V::load(&a), V::load(&b));
            let got = [x.larger(y), x.smaller(y), x.zero_below(y, x), x.power_of_two()];
            let right = [a.larger(b), a.smaller(b), a.zero_below(b, a), a.power_of_two()];
            assert_eq!(
                got.map(|lanes| lanes.array().map(bits)),
                right.map(|lanes| lanes.map(bits))
            );
            let halves: [f16; LANES] = std::array::from_fn(|lane| f16::from_f32(a[lane]));
            // SAFETY: there are 16 of them.
            let (got, right) = unsafe { (V::load_halves(halves.as_ptr()), Lanes::load_halves(halves.as_ptr())) };
            assert_eq!(got.array().map(bits), right.map(bits));
        }
    }
    #[cfg(target_arch = "x86_64")]
    {
        if avx2::detect().is_some() {
            agree::<super::vector::Avx2>();
        }
        if avx512::detect().is_some() {
            agree::<super::vector::Avx512>();
        }
    }
    #[cfg(target_arch = "aarch64")]
    agree::<super::vector::Neon>();
}

proptest! {
    #[test]
    fn row_operations_agree(seed: u64, blocks in 1usize..60, exponent in -40i32..38) {
        let random = &mut Random(seed);
        let scale = 10f32.powi(exponent);
        let x = random.floats(blocks * BLOCK, scale);
        let weight = random.floats(x.len(), 2.0);
        for kernels in others() {
            let (mut expected, mut got) = (vec![0.0; x.len()], vec![0.0; x.len()]);
            (portable::KERNELS.rms_norm)(&x, &weight, 1e-5, &mut expected);
            (kernels.rms_norm)(&x, &weight, 1e-5, &mut got);
            prop_assert_eq!(bits(&expected), bits(&got));
            let (right, other) = (quantised(&portable::KERNELS, &x, x.len()), quantised(&kernels, &x, x.len()));
            prop_assert_eq!(&right.quants, &other.quants);
            prop_assert_eq!(marks_bits(&right.marks), marks_bits(&other.marks));
            let halves: [Vec<Lanes>; 2] = std::array::from_fn(|half| x.as_chunks::<LANES>().0.iter().skip(half).step_by(2).copied().collect());
            let unwritten = QuantisedBlock { marks: UNWRITTEN, ..Default::default() };
            let mut in_blocks = vec![unwritten; blocks];
            (kernels.quantise_blocks)(halves.each_ref().map(Vec::as_slice), &mut in_blocks);
            let of_row = right.quants.as_chunks::<BLOCK>().0.iter().zip(&right.marks);
            for ((quants, marks), block) in of_row.zip(&in_blocks) {
                prop_assert_eq!((&quants[..], *marks), (block.quants.as_flattened(), block.marks));
            }
            let (x, up) = (*x.first_chunk::<LANES>().unwrap(), *weight.first_chunk::<LANES>().unwrap());
            let (expected, got) = (unary(&portable::KERNELS, &x, &up), unary(&kernels, &x, &up));
            prop_assert_eq!(expected.map(|lanes| bits(&lanes)), got.map(|lanes| bits(&lanes)));
        }
    }
}

/// Both gates and a cap.
fn unary(kernels: &Kernels, x: &Lanes, up: &Lanes) -> [Lanes; 3] {
    let mut out = [*x; 3];
    (kernels.gate_silu)(&mut out[..1], std::slice::from_ref(up));
    (kernels.gate_gelu)(&mut out[1..2], std::slice::from_ref(up));
    (kernels.softcap)(&mut out[2], 3.0);
    out
}

/// The quantised form against its definition: half a step of error at most, sums as told.
#[test]
fn quantisation_is_what_it_says() {
    let mut x = Random(3).floats(10 * BLOCK, 5.0);
    x[..5 * BLOCK].iter_mut().for_each(|x| *x += 20.0);
    let got = quantised(&portable::KERNELS, &x, x.len());
    for (block, x) in x.chunks(BLOCK).enumerate() {
        let (quants, marks) = (&got.quants[block * BLOCK..][..BLOCK], got.marks[block]);
        assert_eq!(quants.iter().map(|q| i32::from(*q)).sum::<i32>(), marks.sum);
        assert!(quants.contains(&127) && quants.contains(&-127));
        let values = quants
            .iter()
            .map(|quant| marks.middle + f32::from(*quant) * marks.scale);
        assert!((values.clone().sum::<f32>() - marks.total).abs() < 1e-3);
        for (x, value) in x.iter().zip(values) {
            assert!((x - value).abs() <= marks.scale * 0.5001);
        }
    }
    // Halves go to even: 127 and -127 fix the step at 1.
    let mut halves = [0.0; BLOCK];
    halves[..7].copy_from_slice(&[127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5]);
    assert_eq!(
        quantised(&portable::KERNELS, &halves, BLOCK).quants[..7],
        [127, -127, 0, 2, 2, 0, -2]
    );
}

/// Values that are equal, or so near each other that their middle is one of them.
#[test]
fn blocks_without_a_range_keep_their_values() {
    for value in [0.0f32, 0.3, -7.0, 1e-31] {
        let same = quantised(&portable::KERNELS, &[value; BLOCK], BLOCK);
        let wanted = BlockMarks {
            scale: 0.0,
            middle: value,
            total: value * 32.0,
            sum: 0,
        };
        assert_eq!((&same.quants[..], same.marks[0]), (&[0; BLOCK][..], wanted));
        let mut near = [value; BLOCK];
        near[7] = value.next_up();
        let got = quantised(&portable::KERNELS, &near, BLOCK);
        for (x, quant) in near.iter().zip(&got.quants) {
            let error = x - got.marks[0].middle - f32::from(*quant) * got.marks[0].scale;
            assert!(error.abs() <= 0.501 * (value.next_up() - value) + 1e-30, "{value}");
        }
    }
}

/// No kernel may get a quant of -128, whatever an input is.
#[test]
fn quants_of_what_is_no_number_agree_and_have_seven_bits() {
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
    let special = [
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MAX,
        f32::MIN,
        1e-45,
        -0.0,
    ];
    for first in special {
        for second in special {
            let mut x: [f32; BLOCK] = std::array::from_fn(|i| i as f32 - 11.3);
            (x[3], x[20]) = (first, second);
            let right = quantised(&portable::KERNELS, &x, BLOCK);
            assert!(right.quants.iter().all(|quant| *quant != i8::MIN), "{first} {second}");
            for kernels in others() {
                let got = quantised(&kernels, &x, BLOCK);
                assert_eq!(right.quants, got.quants, "{} {first} {second}", kernels.name);
                let (right, got) = (right.marks[0], got.marks[0]);
                assert!(
                    same(right.scale, got.scale) && same(right.middle, got.middle) && same(right.total, got.total),
                    "{} {first} {second}: {right:?} {got:?}",
                    kernels.name
                );
            }
        }
    }
}

#[test]
fn gates_and_caps_agree_at_the_edges_and_are_what_they_say() {
    let edges = [
        0.0, -0.0, 1e-30, 20.0, -20.0, 86.9, -86.9, 87.1, -87.1, 88.1, -88.1, 1e30, -1e30, 0.5, -0.5, 3.0,
    ];
    let expected = unary(&portable::KERNELS, &edges, &[1.0; LANES]);
    for kernels in others() {
        let got = unary(&kernels, &edges, &[1.0; LANES]);
        assert_eq!(
            expected.map(|lanes| bits(&lanes)),
            got.map(|lanes| bits(&lanes)),
            "{}",
            kernels.name
        );
    }
    let close = |got: f32, right: f64| {
        assert!(
            (f64::from(got) - right).abs() <= 2e-6 * (1.0 + right.abs()),
            "{got} {right}"
        )
    };
    for step in -200..200 {
        let x = step as f32 * 0.05;
        let [silu, gelu, cap] = unary(&portable::KERNELS, &[x; LANES], &[2.0; LANES]).map(|lanes| lanes[0]);
        let x = f64::from(x);
        close(silu, 2.0 * x / (1.0 + (-x).exp()));
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
        close(gelu, 2.0 * 0.5 * x * (1.0 + inner.tanh()));
        close(cap, 3.0 * (x / 3.0).tanh());
    }
}
